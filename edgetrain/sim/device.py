"""Lesser devices: the same engine, held back in what it runs and how fast."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from edgetrain.abilities import BACKWARD, JVP, WEIGHTS
from edgetrain.errors import EngineError
from edgetrain.manifest import GraphSpec, Role
from edgetrain.runtime.engines.base import Array, Engine, LoadedGraph, Measuring, Seen

_NAMED: Final = re.compile(rb"stage[0-9]+/(backward|loss)")


class SlowedEngine:
    """An engine whose every run takes `1 / speed` times as long.

    Args:
        engine: does the work.
        speed: share of its speed, above 0, at most 1.
        sleep: waits so many seconds.
    """

    def __init__(
        self, engine: Engine, speed: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.name = engine.name
        self._engine = engine
        self._speed = speed
        self._sleep = sleep

    def load(
        self, graph: bytes, spec: GraphSpec, held: Mapping[str, npt.NDArray[np.float32]]
    ) -> LoadedGraph:
        """See `Engine.load`."""
        return _SlowedGraph(self._engine.load(graph, spec, held), self._speed, self._sleep)

    def measure(self, graph: bytes, spec: GraphSpec) -> Seen | None:
        """See `Measuring.measure`."""
        engine = self._engine
        return engine.measure(graph, spec) if isinstance(engine, Measuring) else None


class _SlowedGraph:
    def __init__(
        self, graph: LoadedGraph, speed: float, sleep: Callable[[float], None]
    ) -> None:
        self._graph = graph
        self._speed = speed
        self._sleep = sleep

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        start = time.perf_counter()
        results = self._graph.run(feeds)
        self._sleep((time.perf_counter() - start) * (1 / self._speed - 1))
        return results

    def holding(self, held: Mapping[str, npt.NDArray[np.float32]]) -> LoadedGraph:
        return _SlowedGraph(self._graph.holding(held), self._speed, self._sleep)


class NarrowedEngine:
    """An engine that refuses some graphs, as the compilers of accelerators do.

    Args:
        engine: runs the others.
        runs: of `ABILITIES`, those it keeps.
    """

    def __init__(self, engine: Engine, runs: Collection[str]) -> None:
        self.name = engine.name
        self._engine = engine
        self._runs = frozenset(runs)

    def load(
        self, graph: bytes, spec: GraphSpec, held: Mapping[str, npt.NDArray[np.float32]]
    ) -> LoadedGraph:
        """See `Engine.load`."""
        lacking = _needs(graph, spec) - self._runs
        if lacking:
            raise EngineError(f"this engine runs no {', '.join(sorted(lacking))} graphs")
        return self._engine.load(graph, spec, held)

    def measure(self, graph: bytes, spec: GraphSpec) -> Seen | None:
        """See `Measuring.measure`."""
        engine = self._engine
        return engine.measure(graph, spec) if isinstance(engine, Measuring) else None


def _needs(graph: bytes, spec: GraphSpec) -> frozenset[str]:
    """The abilities that a graph takes.

    The contraction of a layer with a cotangent, and the cotangent of a loss at what it
    applies to, are plain forwards: a backward brings a cotangent further up, or is named
    one where it ends at weights.
    """
    taken = {port.role for port in spec.inputs}
    given = {port.role for port in spec.outputs}
    own = {port.key for port in spec.inputs if port.role is Role.STASH}
    further = any(p.role is Role.COTANGENT and p.key not in own for p in spec.outputs)
    named = Role.GRADIENT in given and _NAMED.search(graph) is not None
    found = {
        BACKWARD: further or named,
        JVP: Role.TANGENT in taken | given,
        WEIGHTS: Role.WEIGHT in taken,
    }
    return frozenset(word for word, needed in found.items() if needed)
