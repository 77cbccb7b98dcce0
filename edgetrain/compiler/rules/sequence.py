"""Running sums, triangles, reversals and ramps."""

from __future__ import annotations

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents, add_all
from edgetrain.compiler.rules.shaping import reshape, sum_axes


def cumsum_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """The transpose of a running sum runs the other way."""
    reverse = 1 - int(node.get("reverse", 0))
    exclusive = int(node.get("exclusive", 0))
    return (g("CumSum", dy, node.inputs[1], reverse=reverse, exclusive=exclusive),)


def self_transposed_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Serves ops whose matrix is its own transpose: Trilu and ReverseSequence."""
    return (g(node.op_type, dy, *node.inputs[1:], **node.attributes),)


def range_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y_i = start + i * delta; the limit only says how many there are."""
    start, _, delta = node.inputs
    dstart = reshape(g, sum_axes(g, dy, [0]), g.shape(start))
    weighted = g("Mul", dy, _positions(g, node))
    return dstart, None, reshape(g, sum_axes(g, weighted, [0]), g.shape(delta))


def range_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    tstart, _, tdelta = tangents
    steps = tdelta and g("Mul", _positions(g, node), reshape(g, tdelta, (1,)))
    total = add_all(g, tstart and reshape(g, tstart, (1,)), steps)
    return total and g("Expand", total, g.ints(*g.shape(node.output)))


def _positions(g: GraphBuilder, node: Node) -> str:
    (count,) = g.shape(node.output)
    return g.constant(np.arange(count), g.dtype(node.output))
