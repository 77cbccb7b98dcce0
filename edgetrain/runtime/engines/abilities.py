"""What an engine runs: found out by running small graphs and looking at the results."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from edgetrain.abilities import ABILITIES, BACKWARD, JVP, WEIGHTS
from edgetrain.errors import EngineError
from edgetrain.manifest import GraphSpec, Port, Role
from edgetrain.runtime.engines.base import Array, Engine

log = logging.getLogger(__name__)

TOLERANCE: Final = 1e-2  # an engine may work in half precision

# Each a model of float32 tensors, x among its inputs, all [2, 2] unless said otherwise.

# A cotangent d through a rectifier: z = d where x > 0. db, the sum of its rows; dw = x'z;
# dx [1, 1, 4, 4], z through the transpose of a convolution by ones of stride 2; and ds, z
# gathered with its rows swapped, and scattered back.
BACKWARD_MODEL: Final = base64.b64decode(
    "CAo6ngUKEgoBeAoBMBIBYSIHR3JlYXRlcgoXCgFhEgFtIgRDYXN0KgkKAnRvGAGgAQIKDgoBZAoBbRIBeiID"
    "TXVsCioKAXoKBWZpcnN0EgJkYiIJUmVkdWNlU3VtKg8KCGtlZXBkaW1zGACgAQIKIAoBeBIBdCIJVHJhbnNw"
    "b3NlKg0KBHBlcm1AAUAAoAEHChIKAXQKAXoSAmR3IgZNYXRNdWwKFgoBegoFaW1hZ2USAWkiB1Jlc2hhcGUK"
    "KwoBaQoBaxICZHgiDUNvbnZUcmFuc3Bvc2UqEAoHc3RyaWRlc0ACQAKgAQcKKQoBegoEdHVybhIBZyIOR2F0"
    "aGVyRWxlbWVudHMqCwoEYXhpcxgAoAECCkMKAWUKBHR1cm4KAWcSAmRzIg9TY2F0dGVyRWxlbWVudHMqCwoE"
    "YXhpcxgAoAECKhMKCXJlZHVjdGlvbiIDYWRkoAEDEgFwKgsQAUIBMEoEAAAAACoVCAEQB0IFZmlyc3RKCAAA"
    "AAAAAAAAKi0IBBAHQgVpbWFnZUogAQAAAAAAAAABAAAAAAAAAAIAAAAAAAAAAgAAAAAAAAAqHwgBCAEIAggC"
    "EAFCAWtKEAAAgD8AAIA/AACAPwAAgD8qLggCCAIQB0IEdHVybkogAQAAAAAAAAABAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAqGwgCCAIQAUIBZUoQAAAAAAAAAAAAAAAAAAAAAFoTCgF4Eg4KDAgBEggKAggCCgIIAloTCgFk"
    "Eg4KDAgBEggKAggCCgIIAmIQCgJkYhIKCggIARIECgIIAmIUCgJkdxIOCgwIARIICgIIAgoCCAJiHAoCZHgS"
    "FgoUCAESEAoCCAEKAggBCgIIBAoCCARiFAoCZHMSDgoMCAESCAoCCAIKAggCQgQKABAU"
)
# Along a tangent t of x: p = Softmax(Tanh(x w)) with w = [[1, -1], [1/2, 2]], and tp.
JVP_MODEL: Final = base64.b64decode(
    "CAo6/gIKEQoBeAoBdxIBaCIGTWF0TXVsCgwKAWgSAXkiBFRhbmgKEgoBdAoBdxICdGgiBk1hdE11bAoPCgF5"
    "CgF5EgJ5eSIDTXVsCg8KATEKAnl5EgFzIgNTdWIKEAoCdGgKAXMSAnR5IgNNdWwKHAoBeRIBcCIHU29mdG1h"
    "eCoLCgRheGlzGAGgAQIKEAoBcAoCdHkSAnB0IgNNdWwKKQoCcHQKBGxhc3QSAXIiCVJlZHVjZVN1bSoPCghr"
    "ZWVwZGltcxgBoAECCg4KAXAKAXISAXEiA011bAoQCgJwdAoBcRICdHAiA1N1YhIBcCobCAIIAhABQgF3ShAA"
    "AIA/AACAvwAAAD8AAABAKgsQAUIBMUoEAACAPyoUCAEQB0IEbGFzdEoIAQAAAAAAAABaEwoBeBIOCgwIARII"
    "CgIIAgoCCAJaEwoBdBIOCgwIARIICgIIAgoCCAJiEwoBcBIOCgwIARIICgIIAgoCCAJiFAoCdHASDgoMCAES"
    "CAoCCAIKAggCQgQKABAU"
)
# y = x w, and c [1, 1, 1, 1], the convolution of x by k [1, 1, 2, 2].
WEIGHTS_MODEL: Final = base64.b64decode(
    "CAo65wEKEQoBeAoBdxIBeSIGTWF0TXVsChYKAXgKBWltYWdlEgFpIgdSZXNoYXBlCg8KAWkKAWsSAWMiBENv"
    "bnYSAXAqLQgEEAdCBWltYWdlSiABAAAAAAAAAAEAAAAAAAAAAgAAAAAAAAACAAAAAAAAAFoTCgF4Eg4KDAgB"
    "EggKAggCCgIIAloTCgF3Eg4KDAgBEggKAggCCgIIAlobCgFrEhYKFAgBEhAKAggBCgIIAQoCCAIKAggCYhMK"
    "AXkSDgoMCAESCAoCCAIKAggCYhsKAWMSFgoUCAESEAoCCAEKAggBCgIIAQoCCAFCBAoAEBQ="
)

_X: Final = np.asarray([[1.5, -0.5], [-1, 2]], np.float32)
_D: Final = np.asarray([[0.5, 1], [-2, 0.25]], np.float32)
_W: Final = np.asarray([[1, -1], [0.5, 2]], np.float32)


def abilities(engine: Engine) -> tuple[str, ...]:
    """Which of `ABILITIES` the engine has.

    It has one when it loads and runs the ability's graph, and the numbers are right.
    """
    return tuple(word for word in ABILITIES if _holds(_PROBES[word], engine, word))


def _holds(probe: Callable[[Engine], bool], engine: Engine, word: str) -> bool:
    try:
        held = probe(engine)
    except EngineError as error:
        log.info("the engine does not run %r graphs: %s", word, error)
        return False
    if not held:
        log.warning("the engine computes something else in %r graphs", word)
    return held


def _runs_backward(engine: Engine) -> bool:
    inputs = (_port("x", Role.STASH), _port("d", Role.COTANGENT))
    outputs = (
        _port("db", Role.GRADIENT, 2),
        _port("dw", Role.GRADIENT),
        _port("dx", Role.COTANGENT, 1, 1, 4, 4),
        _port("ds", Role.COTANGENT),
    )
    loaded = engine.load(BACKWARD_MODEL, GraphSpec(inputs, outputs, ""), {})
    found = loaded.run({"x": _X, "d": _D})
    z = _D * (_X > 0)
    dx = np.kron(z, np.ones((2, 2))).reshape(1, 1, 4, 4)
    expected = {"db": z.sum(0), "dw": _X.T @ z, "dx": dx, "ds": z}
    return _agree(found, expected)


def _runs_jvp(engine: Engine) -> bool:
    inputs = (_port("x", Role.ACTIVATION), _port("t", Role.TANGENT))
    outputs = (_port("p", Role.ACTIVATION), _port("tp", Role.TANGENT))
    loaded = engine.load(JVP_MODEL, GraphSpec(inputs, outputs, ""), {})
    y = np.tanh(_X @ _W)
    p = np.exp(y) / np.exp(y).sum(1, keepdims=True)
    pt = p * (_D @ _W) * (1 - y * y)
    expected = {"p": p, "tp": pt - p * pt.sum(1, keepdims=True)}
    return _agree(loaded.run({"x": _X, "t": _D}), expected)


def _runs_weights(engine: Engine) -> bool:
    """Twice, as weights change in place between two runs."""
    image = (1, 1, 2, 2)
    inputs = (
        _port("x", Role.ACTIVATION),
        _port("w", Role.WEIGHT),
        _port("k", Role.WEIGHT, *image),
    )
    outputs = (_port("y", Role.ACTIVATION), _port("c", Role.ACTIVATION, 1, 1, 1, 1))
    w, k = _W.copy(), _D.reshape(image).copy()
    loaded = engine.load(WEIGHTS_MODEL, GraphSpec(inputs, outputs, ""), {"w": w, "k": k})
    for _ in range(2):
        c = (_X * k[0, 0]).sum().reshape(1, 1, 1, 1)
        if not _agree(loaded.run({"x": _X}), {"y": _X @ w, "c": c}):
            return False
        w += 1
        k *= 2
    return True


_PROBES: Final = {
    BACKWARD: _runs_backward,
    JVP: _runs_jvp,
    WEIGHTS: _runs_weights,
}


def _port(name: str, role: Role, *shape: int) -> Port:
    return Port(name, role, name, "float32", shape or (2, 2))


def _agree(found: dict[str, Array], expected: dict[str, npt.NDArray[np.float32]]) -> bool:
    return found.keys() == expected.keys() and all(
        np.allclose(found[name], value, rtol=TOLERANCE, atol=TOLERANCE)
        for name, value in expected.items()
    )
