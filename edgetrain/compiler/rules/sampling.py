"""GridSample: reading an image at computed places between its elements.

A sample is a weighted sum of the elements around its place, its taps: one for "nearest",
2^r in r dimensions for "linear". Linear in the image, and piecewise smooth in the place:
on an element itself the slope is that of the side above; "nearest" has none but jumps; at
and beyond an edge that clamps the slope is 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from onnx import TensorProto

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents, add_all
from edgetrain.compiler.rules.shaping import (
    mask,
    reshape,
    scaled,
    sum_axes,
    to_type,
    zeros,
)
from edgetrain.errors import UnsupportedOpError


@dataclass(frozen=True, slots=True)
class _Axis:
    """The places along one axis of the image, each value [N, L] with L samples an image.

    Attributes:
        indices: of the element below, and of that above unless the nearest is taken.
        weights: of these; 0 outside an image that is padded with zeros.
        slopes: of the weights, by the grid's own coordinate; empty for "nearest".
    """

    indices: tuple[str, ...]
    weights: tuple[str, ...]
    slopes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Tap:
    """One element around each place.

    Attributes:
        index: in the flat image, int64 [N, C, L].
        weight: [N, 1, L].
        slopes: of the weight by each coordinate of the grid, [N, 1, L]; may be empty.
    """

    index: str
    weight: str
    slopes: tuple[str, ...]


def grid_sample_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Spread dy over the taps; by the grid, weigh what the taps differ by.

    Raises:
        UnsupportedOpError: cubic interpolation.
    """
    x, grid = node.inputs
    n, channels, *image = g.shape(x)
    taps = list(_taps(g, node))
    dy = reshape(g, dy, (n, channels, -1))
    parts = g("Concat", *(g("Mul", dy, tap.weight) for tap in taps), axis=2)
    indices = g("Concat", *(tap.index for tap in taps), axis=2)
    nothing = zeros(g, (n, channels, math.prod(image)), x)
    dx = g("ScatterElements", nothing, indices, parts, axis=2, reduction="add")
    dx = reshape(g, dx, g.shape(x))
    if not taps[0].slopes:
        return dx, zeros(g, g.shape(grid), grid)
    along = [sum_axes(g, g("Mul", dy, _held(g, node, t)), [1], keepdims=True) for t in taps]
    columns = []
    for k in range(len(image)):
        terms = [g("Mul", a, t.slopes[k]) for a, t in zip(along, taps, strict=True)]
        columns.append(_chain(g, "Add", terms))
    stacked = g("Transpose", g("Concat", *columns, axis=1), perm=[0, 2, 1])
    return dx, reshape(g, stacked, g.shape(grid))


def grid_sample_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    tx, tgrid = tangents
    by_image = tx and g("GridSample", tx, node.inputs[1], **node.attributes)
    if tgrid is None:
        return by_image
    taps = list(_taps(g, node))
    if not taps[0].slopes:
        return by_image or zeros(g, g.shape(node.output), node.output)
    n = g.shape(node.output)[0]
    moves = [reshape(g, t, (n, 1, -1)) for t in _coordinates(g, node, tgrid)]
    terms = []
    for tap in taps:
        pairs = zip(tap.slopes, moves, strict=True)
        moved = _chain(g, "Add", [g("Mul", slope, t) for slope, t in pairs])
        terms.append(g("Mul", _held(g, node, tap), moved))
    by_grid = reshape(g, _chain(g, "Add", terms), g.shape(node.output))
    return add_all(g, by_image, by_grid)


def _held(g: GraphBuilder, node: Node, tap: _Tap) -> str:
    """What the image holds at a tap, [N, C, L]."""
    n, channels = g.shape(node.output)[:2]
    flat = reshape(g, node.inputs[0], (n, channels, -1))
    return g("GatherElements", flat, tap.index, axis=2)


def _coordinates(g: GraphBuilder, node: Node, grid: str) -> list[str]:
    """The components of a grid or of its tangent, [N, L] each."""
    n, *_, rank = g.shape(node.inputs[1])
    rows = reshape(g, grid, (n, -1, rank))
    return [g("Gather", rows, g.constant(k, "int64"), axis=2) for k in range(rank)]


def _taps(g: GraphBuilder, node: Node) -> Iterator[_Tap]:
    n, channels, *image = g.shape(node.inputs[0])
    sizes = image[::-1]  # the grid names the last axis of the image first
    pairs = zip(_coordinates(g, node, node.inputs[1]), sizes, strict=True)
    axes = [_axis(g, node, place, size) for place, size in pairs]
    strides = [math.prod(sizes[:k]) for k in range(len(sizes))]
    row = (n, 1, math.prod(g.shape(node.output)[2:]))
    for corner in itertools.product(range(len(axes[0].indices)), repeat=len(axes)):
        chosen = list(zip(axes, corner, strict=True))
        steps = [
            scaled(g, axis.indices[c], stride, node.output)
            for (axis, c), stride in zip(chosen, strides, strict=True)
        ]
        index = g("Cast", _chain(g, "Add", steps), to=TensorProto.INT64)
        weights = [axis.weights[c] for axis, c in chosen]
        slopes = [
            _chain(g, "Mul", [*weights[:k], axis.slopes[c], *weights[k + 1 :]])
            for k, (axis, c) in enumerate(chosen)
            if axis.slopes
        ]
        yield _Tap(
            g("Expand", reshape(g, index, row), g.ints(n, channels, row[2])),
            reshape(g, _chain(g, "Mul", weights), row),
            tuple(reshape(g, slope, row) for slope in slopes),
        )


def _axis(g: GraphBuilder, node: Node, coordinate: str, size: int) -> _Axis:
    x = node.inputs[0]
    mode = node.get("mode", "linear")
    if mode == "cubic":
        raise UnsupportedOpError(
            node.op_type, node.name, "its mode is 'cubic'; use 'linear' or 'nearest'"
        )
    place, slope = _place(g, node, coordinate, size)
    if mode == "nearest":
        index, inside = _within(g, node, g("Round", place), size)
        return _Axis((index,), (inside,), ())
    below = g("Floor", place)
    part, one = g("Sub", place, below), g.scalar(1, x)
    indices, weights, slopes = [], [], []
    for end, weight, rate in (
        (below, g("Sub", one, part), g("Neg", slope)),
        (g("Add", below, one), part, slope),
    ):
        index, inside = _within(g, node, end, size)
        indices.append(index)
        weights.append(g("Mul", weight, inside))
        slopes.append(g("Mul", rate, inside))
    return _Axis(tuple(indices), tuple(weights), tuple(slopes))


def _place(g: GraphBuilder, node: Node, coordinate: str, size: int) -> tuple[str, str]:
    """Coordinates in -1 to 1 as places in the image, and their derivative."""
    x, padding = node.inputs[0], node.get("padding_mode", "zeros")
    aligned = bool(node.get("align_corners", 0))
    rate = ((size - 1) if aligned else size) / 2
    place = g("Add", scaled(g, coordinate, rate, x), g.scalar((size - 1) / 2, x))
    slope = g.scalar(rate, x)
    if padding == "border":
        last, first = g.scalar(size - 1, x), g.scalar(0, x)
        inside = g("And", g("Greater", place, first), g("Less", place, last))
        return g("Clip", place, first, last), g("Mul", slope, to_type(g, inside, x))
    if padding == "reflection" and rate:
        return _reflect(g, x, place, (0.0 if aligned else -0.5, 2 * rate), slope)
    return place, slope


def _reflect(
    g: GraphBuilder, x: str, place: str, span: tuple[float, float], slope: str
) -> tuple[str, str]:
    """Fold places back into a span, given by its start and length."""
    start, length = span
    whole, turn = g.scalar(2 * length, x), g.scalar(length, x)
    shifted = g("Sub", place, g.scalar(start, x))
    round_trip = g("Mul", g("Floor", g("Div", shifted, whole)), whole)
    there = g("Sub", shifted, round_trip)
    folded = g("Sub", turn, g("Abs", g("Sub", there, turn)))
    back = mask(g, "Greater", there, turn, like=x)
    sign = g("Sub", g.scalar(1, x), g("Add", back, back))
    return g("Add", folded, g.scalar(start, x)), g("Mul", sign, slope)


def _within(g: GraphBuilder, node: Node, index: str, size: int) -> tuple[str, str]:
    """An index clamped to the image, and the weight of what it stands for."""
    x = node.inputs[0]
    first, last = g.scalar(0, x), g.scalar(size - 1, x)
    clamped = g("Clip", index, first, last)
    if node.get("padding_mode", "zeros") != "zeros":
        n, *samples, _ = g.shape(node.inputs[1])
        return clamped, g("Expand", g.scalar(1, x), g.ints(n, math.prod(samples)))
    return clamped, mask(g, "Equal", clamped, index, like=x)


def _chain(g: GraphBuilder, op_type: str, terms: Sequence[str]) -> str:
    return reduce(lambda a, b: g(op_type, a, b), terms)
