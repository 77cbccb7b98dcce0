"""Operators that select elements: Slice and Gather."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents
from edgetrain.compiler.rules.shaping import mask, reshape, zeros

# Up to so many rows, a product with a one-hot matrix beats scattering.
FEW_ROWS: Final = 100


def slice_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Put dy back where it came from, zeros elsewhere."""
    x = node.inputs[0]
    shape = g.shape(x)
    before, after = [0] * len(shape), [0] * len(shape)
    for axis, taken in _taken(g, node):
        if taken.step == 1:
            before[axis], after[axis] = taken.start, shape[axis] - taken.stop
        else:
            dy = _place(g, dy, axis, list(taken), shape[axis])
    if any((*before, *after)):
        dy = g("Pad", dy, g.ints(*before, *after))
    return (dy,)


def _taken(g: GraphBuilder, node: Node) -> list[tuple[int, range]]:
    """Each sliced axis with the indices taken along it."""
    shape = g.shape(node.inputs[0])
    starts, ends = (g.value(node.inputs[i]).tolist() for i in (1, 2))
    axes = g.value(node.input(3)).tolist() if node.input(3) else [*range(len(starts))]
    steps = g.value(node.input(4)).tolist() if node.input(4) else [1] * len(starts)
    taken = []
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        indices = range(shape[axis])[start:end:step]
        taken.append((axis % len(shape), indices))
    return taken


def gather_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Add each slice of dy to the row it was read from.

    Rows known ahead and distinct are moved by a Gather the other way. Otherwise a table
    of few rows takes a product with a one-hot matrix, a larger one ScatterElements, which
    unlike ScatterND adds up repeated rows rightly on any number of threads.
    """
    x, indices = node.inputs
    axis = int(node.get("axis", 0)) % g.rank(x)
    shape, count = g.shape(x), math.prod(g.shape(indices))
    extent = shape[axis]
    if g.is_constant(indices):
        rows = (g.value(indices).ravel() % extent).tolist()
        if len(set(rows)) == len(rows):
            taken = reshape(g, dy, (*shape[:axis], count, *shape[axis + 1 :]))
            return (_place(g, taken, axis, rows, extent),)
    picked = (math.prod(shape[:axis]), count, math.prod(shape[axis + 1 :]))
    dy = reshape(g, dy, picked)
    flat = reshape(g, indices, (1, count))
    if extent <= FEW_ROWS:
        every = g.constant(np.arange(extent)[:, None], g.dtype(indices))
        wrapped = g("Mod", flat, g.constant(extent, g.dtype(indices)))
        chosen = mask(g, "Equal", wrapped, every, like=x)
        return (reshape(g, g("MatMul", chosen, dy), shape),)
    spread = g("Expand", reshape(g, flat, (1, count, 1)), g.ints(*picked))
    nothing = zeros(g, (picked[0], extent, picked[2]), x)
    total = g("ScatterElements", nothing, spread, dy, axis=1, reduction="add")
    return (reshape(g, total, shape),)


def _place(
    g: GraphBuilder, value: str, axis: int, positions: Sequence[int], extent: int
) -> str:
    """Move element i along an axis to `positions[i]` of `extent`, zeros elsewhere.

    What stays together is only padded. Otherwise `Pad` puts a zero after the last element
    of this axis, which the free places read.
    """
    first, count = positions[0] if positions else 0, len(positions)
    if list(positions) == [*range(first, first + count)]:
        if count == extent:
            return value
        return g("Pad", value, g.ints(first, extent - first - count), "", g.ints(axis))
    source = np.full(extent, len(positions))
    source[list(positions)] = np.arange(len(positions))
    axes = g.ints(axis)
    padded = g("Pad", value, g.ints(0, 1), "", axes)
    return g("Gather", padded, g.ints(*source.tolist()), axis=axis)
