"""How wide the blocks of ONNX Runtime's own channel layout are on this processor."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Final

import numpy as np

from edgetrain.errors import EngineError
from edgetrain.manifest import GraphSpec, Port, Role
from edgetrain.runtime.engines.base import Array, LoadedGraph

# A model of one node, com.microsoft.nchwc::ReorderInput from x to y, float32 [1, 64, 1, 2].
PROBE: Final = base64.b64decode(
    "CAoSADpoCikKAXgSAXkiDFJlb3JkZXJJbnB1dDoTY29tLm1pY3Jvc29mdC5uY2h3YxIBcFobCgF4EhYKFAgB"
    "EhAKAggBCgIIQAoCCAEKAggCYhsKAXkSFgoUCAESEAoCCAEKAghACgIIAQoCCAJCBAoAEBRCFwoTY29tLm1p"
    "Y3Jvc29mdC5uY2h3YxAB"
)
SHAPE: Final = (1, 64, 1, 2)
WIDTHS: Final = frozenset({8, 16})

Load = Callable[[bytes, GraphSpec], LoadedGraph]


def block_width(load: Load) -> int:
    """Channels in a block; 0 where the engine has no such layout.

    The probe reorders 0, 1, 2, ...: in blocks of b channels, the second position of the
    first channel, which holds 1, comes b places after the first.

    Args:
        load: loads a graph that holds nothing.
    """
    ports = [Port(name, Role.ACTIVATION, name, "float32", SHAPE) for name in "xy"]
    spec = GraphSpec((ports[0],), (ports[1],), "")
    x: Array = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    try:
        y = load(PROBE, spec).run({"x": x})["y"]
    except EngineError:
        return 0
    width = int(np.argmax(y.ravel() == 1))
    return width if width in WIDTHS else 0
