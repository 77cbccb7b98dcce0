"""Models that hold integers for weights: what of them trains exactly, and what cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper

from edgetrain.compiler.tidy import all_nodes, graphs

Array = npt.NDArray[Any]

# They round data to integers: no gradient passes, and none that a user would want.
_ROUNDING: Final = frozenset({"DynamicQuantizeLinear", "QuantizeLinear"})
_QUANTISED_TYPES: Final = frozenset(
    value
    for name, value in TensorProto.DataType.items()
    if name.startswith(("INT8", "UINT8", "INT4", "UINT4", "INT2", "UINT2", "FLOAT8"))
)


def count(graph: onnx.GraphProto) -> int:
    """How many tensors of more than one element are held as 8 bits or fewer."""
    tensors = [tensor for inner in graphs(graph) for tensor in inner.initializer]
    tensors += [
        attribute.t
        for node in all_nodes(graph)
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
    ]
    return sum(t.data_type in _QUANTISED_TYPES and np.prod(t.dims) > 1 for t in tensors)


def before_rounding(graph: onnx.GraphProto) -> set[str]:
    """The values some of whose influence on the outputs passes a rounding to integers."""
    reached: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type in _ROUNDING or not reached.isdisjoint(node.output):
            reached.update(filter(None, node.input))
    return reached


def freeze(graph: onnx.GraphProto, weights: Mapping[str, Array]) -> list[str]:
    """Make constants of the weights that lie before a rounding, in place.

    A rounding has the derivative zero. To take its gradient for one (the straight-through
    estimate) would train another function than the file computes, and to leave the path
    out would train along the remaining paths only; so these weights stay as they are.

    Args:
        graph: its nodes are sorted.
        weights: value of each weight, which is an input of the graph.

    Returns:
        Their names.
    """
    before = before_rounding(graph)
    names = [name for name in weights if name in before]
    kept = [info for info in graph.input if info.name not in names]
    del graph.input[:]
    graph.input.extend(kept)
    graph.initializer.extend(numpy_helper.from_array(weights[n], n) for n in names)
    return names
