"""Operators that pick elements by index: GatherElements, GatherND, TopK and others."""

from __future__ import annotations

import math

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents
from edgetrain.compiler.rules.places import flat_rows
from edgetrain.compiler.rules.shaping import reshape, sum_axes, zeros
from edgetrain.errors import UnsupportedOpError


def gather_elements_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Add each element of dy to the one it was read from."""
    x, indices = node.inputs
    return (_put_back(g, x, indices, dy, int(node.get("axis", 0))),)


def gather_nd_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Add each slice of dy to the one it was read from, however often that is."""
    x, indices = node.inputs
    shape = g.shape(x)
    rows = flat_rows(g, indices, shape, int(node.get("batch_dims", 0)))
    width = math.prod(shape) // rows.extent
    picked = (rows.count, width)
    spread = g("Expand", reshape(g, rows.name, (rows.count, 1)), g.ints(*picked))
    nothing = zeros(g, (rows.extent, width), x)
    parts = reshape(g, dy, picked)
    total = g("ScatterElements", nothing, spread, parts, axis=0, reduction="add")
    return (reshape(g, total, shape),)


def top_k_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Put dy back at the indices. Of elements that tie, those the kernel took count."""
    indices = _top_indices(node)
    return (_put_back(g, node.inputs[0], indices, dy, int(node.get("axis", -1))),)


def top_k_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    axis = int(node.get("axis", -1))
    tx = tangents[0]
    return tx and g("GatherElements", tx, _top_indices(node), axis=axis)


def _top_indices(node: Node) -> str:
    if len(node.outputs) < 2 or not node.outputs[1]:
        raise UnsupportedOpError(
            node.op_type, node.name, "it needs its indices as second output"
        )
    return node.outputs[1]


def _put_back(g: GraphBuilder, x: str, indices: str, dy: str, axis: int) -> str:
    nothing = zeros(g, g.shape(x), x)
    return g("ScatterElements", nothing, indices, dy, axis=axis, reduction="add")


def compress_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Put dy back where the condition, a constant, holds."""
    x, condition = node.inputs
    shape = g.shape(x)
    axis = node.get("axis", None)
    size = (math.prod(shape),) if axis is None else shape
    at = 0 if axis is None else int(axis) % len(shape)
    chosen = np.flatnonzero(g.value(condition)[: size[at]])
    # Places that are left out read the zero that Pad puts behind the last element.
    source = np.full(size[at], len(chosen))
    source[chosen] = np.arange(len(chosen))
    padded = g("Pad", dy, g.ints(0, 1), "", g.ints(at))
    return (reshape(g, g("Gather", padded, g.ints(*source.tolist()), axis=at), shape),)


def one_hot_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y = off + onehot * (on - off) with values = [off, on], the only float input."""
    unit = g.constant([0, 1], g.dtype(node.inputs[2]))
    hits = g("OneHot", *node.inputs[:2], unit, **node.attributes)
    every = [*range(g.rank(node.output))]
    on = sum_axes(g, g("Mul", dy, hits), every)
    off = g("Sub", sum_axes(g, dy, every), on)
    return None, None, g("Concat", reshape(g, off, (1,)), reshape(g, on, (1,)), axis=0)


def one_hot_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    """Linear in the values: the op itself with their tangent."""
    tvalues = tangents[2]
    return tvalues and g("OneHot", *node.inputs[:2], tvalues, **node.attributes)
