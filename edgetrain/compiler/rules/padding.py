"""Pad, in every mode."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edgetrain.compiler.build import Array, GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents, add_all
from edgetrain.compiler.rules.shaping import reshape, sum_axes, zeros
from edgetrain.errors import UnsupportedOpError


def pad_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Cut the padding off.

    In constant mode what is cut belongs to the padding value; otherwise to the elements it
    was copied from, and is added to them.
    """
    begin, end = _pads(g, node)
    if _mode(node) == "constant":
        return _constant_vjp(g, node, dy, (begin, end))
    for axis, extent in enumerate(g.shape(node.inputs[0])):
        if begin[axis] or end[axis]:
            source = _source(_mode(node), begin[axis], extent, end[axis])
            dy = _fold(g, dy, axis, source, extent)
    return (dy,)


def pad_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    x = node.inputs[0]
    tx, tv = tangents[0], (*tangents, None, None)[2]
    begin, end = _pads(g, node)
    pads = g.ints(*begin, *end)
    padded = tx and g("Pad", tx, pads, mode=_mode(node))
    if tv is None or _mode(node) != "constant":
        return padded
    nothing = zeros(g, g.shape(x), x)
    return add_all(g, padded, g("Pad", nothing, pads, reshape(g, tv, ())))


def _constant_vjp(
    g: GraphBuilder, node: Node, dy: str, pads: tuple[list[int], list[int]]
) -> Cotangents:
    x = node.inputs[0]
    begin, end = pads
    starts = [max(0, b) for b in begin]
    stops = [n - max(0, e) for n, e in zip(g.shape(node.output), end, strict=True)]
    axes = g.ints(*range(len(begin)))
    inside = g("Slice", dy, g.ints(*starts), g.ints(*stops), axes)
    lost = [max(0, -p) for p in (*begin, *end)]
    dx = g("Pad", inside, g.ints(*lost)) if any(lost) else inside
    if not node.input(2):
        return (dx,)
    every = list(range(g.rank(x)))
    outside = g("Sub", sum_axes(g, dy, every), sum_axes(g, inside, every))
    return dx, None, reshape(g, outside, g.shape(node.inputs[2]))


def _fold(g: GraphBuilder, dy: str, axis: int, source: Array, extent: int) -> str:
    """Along an axis, add each element of dy to the one of `extent` it was copied from."""
    parts = []
    for start, stop, step in _runs(source.tolist()):
        low = min(source[start], source[stop - 1])
        high = max(source[start], source[stop - 1])
        if step < 0:
            # A start of -1 would mean the last element, so the end may lie far below.
            bounds = (g.ints(stop - 1), g.ints(start - 1 if start else -len(source) - 1))
            part = g("Slice", dy, *bounds, g.ints(axis), g.ints(-1))
        else:
            part = g("Slice", dy, g.ints(start), g.ints(stop), g.ints(axis))
        if step == 0:
            part = sum_axes(g, part, [axis], keepdims=True)
        around = (int(low), extent - 1 - int(high))
        if any(around):
            part = g("Pad", part, g.ints(*around), "", g.ints(axis))
        parts.append(part)
    return add_all(g, *parts) or dy


def _runs(source: list[int]) -> Iterator[tuple[int, int, int]]:
    """Cut indices into runs that rise by one, fall by one or stay: start, stop and step."""
    start = 0
    while start < len(source):
        stop = start + 1
        step = source[stop] - source[start] if stop < len(source) else 1
        step = step if abs(step) <= 1 else 1
        while stop < len(source) and source[stop] - source[stop - 1] == step:
            stop += 1
        yield start, stop, step
        start = stop


def _source(mode: str, before: int, extent: int, after: int) -> Array:
    """Which element along an axis each padded one is a copy of."""
    index = np.arange(-before, extent + after)
    if mode == "edge":
        return np.clip(index, 0, extent - 1)
    if mode == "wrap":
        return index % extent
    period = max(1, 2 * (extent - 1))
    there = index % period
    return np.minimum(there, period - there) if extent > 1 else there


def _mode(node: Node) -> str:
    return str(node.get("mode", "constant"))


def _pads(g: GraphBuilder, node: Node) -> tuple[list[int], list[int]]:
    """Padding before and after each axis of the input.

    Raises:
        UnsupportedOpError: it crops and copies at once.
    """
    rank = g.rank(node.inputs[0])
    pads = g.value(node.inputs[1]).tolist()
    axes = g.value(node.input(3)).tolist() if node.input(3) else range(rank)
    begin, end = [0] * rank, [0] * rank
    for i, axis in enumerate(axes):
        begin[axis], end[axis] = pads[i], pads[len(pads) // 2 + i]
    if _mode(node) != "constant" and min((*begin, *end), default=0) < 0:
        raise UnsupportedOpError(
            node.op_type, node.name,
            f"its mode is {_mode(node)!r} and it crops; crop with a Slice before it",
        )  # fmt: skip
    return begin, end
