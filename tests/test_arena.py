"""One part of a process has the shared allocator, whichever threads ask for it at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from small_models import build

from edgetrain.arena import Arena
from edgetrain.compiler import reference
from edgetrain.errors import EngineError
from edgetrain.manifest import GraphSpec, Port, Role
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine

THREADS = 8


class Registry:
    """What may be done but once."""

    def __init__(self, failures: int = 0) -> None:
        self.calls = 0
        self._failures = failures

    def register(self) -> None:
        self.calls += 1
        time.sleep(0.001)  # all others get their chance
        if self.calls <= self._failures:
            raise EngineError("no room")


def at_once(act: Callable[[int], object]) -> list[object]:
    barrier = threading.Barrier(THREADS)

    def start(number: int) -> object:
        barrier.wait(10)
        return act(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(start, range(THREADS)))


def test_threads_of_one_owner_register_once() -> None:
    arena, registry = Arena(), Registry()
    assert all(at_once(lambda _: arena.claim("engine", registry.register)))
    assert registry.calls == 1


def test_the_first_of_two_owners_has_it() -> None:
    arena, first, second = Arena(), Registry(), Registry()
    assert arena.claim("compiler", first.register)
    assert not arena.claim("engine", second.register)
    assert arena.claim("compiler", first.register)
    assert (first.calls, second.calls) == (1, 0)


def test_threads_of_two_owners_register_for_one() -> None:
    arena, registries = Arena(), (Registry(), Registry())
    won = at_once(lambda n: arena.claim(str(n % 2), registries[n % 2].register))
    assert won in ([True, False] * (THREADS // 2), [False, True] * (THREADS // 2))
    assert [registry.calls for registry in registries] == won[:2]


def test_a_registration_that_fails_is_tried_again_by_its_owner() -> None:
    arena, registry, other = Arena(), Registry(failures=1), Registry()
    with pytest.raises(EngineError, match="no room"):
        arena.claim("compiler", registry.register)
    assert not arena.claim("engine", other.register)
    assert arena.claim("compiler", registry.register)
    assert (registry.calls, other.calls) == (2, 0)


def run_or_load() -> None:
    """In a process of its own, as a process has but one such allocator."""
    model = build([helper.make_node("Relu", ["x"], ["y"])], [("x", [3])], ["y"])
    ports = [Port(name, Role.ACTIVATION, name, "float32", (3,)) for name in ("x", "y")]
    spec = GraphSpec((ports[0],), (ports[1],), "")
    data, x = model.SerializeToString(), {"x": np.ones(3, np.float32)}

    def act(number: int) -> None:
        if number % 2:
            reference.run(model, x)
        OnnxRuntimeEngine().load(data, spec, {}).run(x)

    at_once(act)


def test_compiler_and_engine_may_begin_in_many_threads_at_once() -> None:
    code = f"import {__name__} as here; here.run_or_load(); print('done')"
    done = subprocess.run(  # noqa: S603 - this file, in a fresh interpreter
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.strip() == "done", done.stderr
