"""Dropout in training form, by the mask it yields."""

from __future__ import annotations

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.shaping import to_type
from edgetrain.errors import UnsupportedOpError


def dropout(g: GraphBuilder, node: Node, t: str) -> str:
    """y = x * mask / (1 - ratio); in inference form y = x.

    The ratio, below 1, is a setting: no derivative is taken by it.

    Raises:
        UnsupportedOpError: it drops, and its mask is not among its outputs.
        GraphError: whether it drops is known at run time only.
    """
    if not (node.input(2) and bool(g.value(node.input(2)).item())):
        return t
    if len(node.outputs) < 2 or not node.outputs[1]:
        raise UnsupportedOpError(
            node.op_type, node.name, "in training mode it needs its mask as second output"
        )
    kept = g("Mul", t, to_type(g, node.outputs[1], node.inputs[0]))
    return g("Mul", kept, _gain(g, node))


def _gain(g: GraphBuilder, node: Node) -> str:
    """1 / (1 - ratio)."""
    x, ratio = node.inputs[0], node.input(1)
    if not ratio:
        return g.scalar(2, x)
    return g("Reciprocal", g("Sub", g.scalar(1, x), to_type(g, ratio, x)))
