"""Conv and ConvTranspose, in the formulations that are fast on an inference engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules import blocked
from edgetrain.compiler.rules.base import Cotangents, Tangents, add_all
from edgetrain.compiler.rules.shaping import (
    Shape,
    channel_sums,
    per_channel,
    reshape,
    sum_axes,
    swap_last,
)
from edgetrain.compiler.rules.sizes import Correlation, conv_sizes
from edgetrain.compiler.rules.window import window

# Up to so many input channels, one product over all taps beats a product a tap.
FEW_CHANNELS: Final = 8
# Below this extent, or with a stride, or from this many taps on, a depthwise weight
# gradient is faster with channels last.
SMALL_MAP: Final = 14
MANY_TAPS: Final = 25
# Where memory counts more than time, the batch is taken in so many parts.
LEAN_PARTS: Final = 4
# An image of at most so many elements, with at least so many channels on both sides, is
# too small for a product a sample.
SMALL_IMAGE: Final = 64
MANY_CHANNELS: Final = 64


def conv_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y = conv(x, w) + b: dx is a transposed convolution, dw a correlation of x and dy."""
    x, w = node.inputs[:2]
    c = conv_sizes(g, node)
    dx = (blocked.dx if blocked.fits_dx(g, w, c) else _conv_dx)(g, w, dy, c)
    return dx, _weight_gradient(g, w, x, dy, c), channel_sums(g, dy, g.shape(node.output))


def conv_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    """ty = conv(tx, w) + conv(x, tw) + tb."""
    x, w = node.inputs[:2]
    tx, tw, tb = (*tangents, None)[:3]
    product = add_all(
        g,
        tx and g(node.op_type, tx, w, **node.attributes),
        tw and g(node.op_type, x, tw, **node.attributes),
    )
    if tb is None:
        return product
    shape = g.shape(node.output)
    tb = per_channel(g, tb, len(shape))
    return g("Add", product, tb) if product else g("Expand", tb, g.ints(*shape))


def conv_transpose_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """A transposed convolution is the dx of a convolution, so its dx is a convolution.

    The weight gradient is that of the convolution from y to x, roles swapped.
    """
    x, w = node.inputs[:2]
    c = _conv_transpose_sizes(g, node)
    dx = g(
        "Conv", dy, w,
        kernel_shape=list(c.window.kernel), strides=list(c.window.strides),
        dilations=list(c.window.dilations), group=c.groups,
        pads=[*c.window.begin, *c.window.end],
    )  # fmt: skip
    dw = _weight_gradient(g, w, dy, x, c)
    return dx, dw, channel_sums(g, dy, g.shape(node.output))


def _weight_gradient(g: GraphBuilder, w: str, image: str, dy: str, c: Correlation) -> str:
    if blocked.fits_depthwise_dw(g, w, c):
        return blocked.depthwise_dw(g, image, dy, c)
    if blocked.fits_dense_dw(g, w, c):
        return blocked.dense_dw(g, image, dy, c)
    return conv_dw(g, image, dy, c)


def conv_dw(g: GraphBuilder, image: str, dy: str, c: Correlation) -> str:
    """The weight gradient [M, C / groups, *kernel] of a convolution.

    Args:
        g: where to emit.
        image: what the windows slide over, [N, C, *image].
        dy: cotangent of the result, [N, M, *steps].
        c: the sizes.

    Dense: one product dy @ x_tap a tap of the kernel, over all positions of all samples,
    which needs both with the positions joined: dy [M, N * positions], and the image with
    channels last. With few input channels these products are too thin, so all taps are
    stacked into one. Grouped, and 1x1: products batched over N, summed over N. Depthwise:
    element-wise products and sums, since a matrix product would compute all pairs of
    channels to keep the diagonal. Lean: a product a tap and sample, which is slower but
    holds no second copy of dy and one tap of a part of the images at a time.
    """
    size = c.batch // LEAN_PARTS
    if not g.lean or size * LEAN_PARTS != c.batch or size == 0:
        return _dw(g, image, dy, c)
    part = replace(c, batch=size)
    ends = [(n, n + size) for n in range(0, c.batch, size)]
    cuts = [(g.ints(a), g.ints(b), g.ints(0)) for a, b in ends]
    parts = [_dw(g, g("Slice", image, *at), g("Slice", dy, *at), part) for at in cuts]
    return add_all(g, *parts) or parts[0]


def _dw(g: GraphBuilder, image: str, dy: str, c: Correlation) -> str:
    few = c.channels <= FEW_CHANNELS and not g.lean
    if c.groups == 1 and not c.window.points and not few and not g.lean:
        return _joined(g, image, dy, c)
    padded = c.window.padded(g, image)
    if c.depthwise:
        last = (
            any(s > 1 for s in c.window.strides)
            or max(c.window.steps) <= SMALL_MAP
            or math.prod(c.window.kernel) >= MANY_TAPS
        )
        return (_depthwise_channels_last if last else _depthwise)(g, padded, dy, c)
    taps = [_tap(g, padded, offset, c) for offset in c.window.taps]
    if c.groups == 1 and few and len(taps) > 1:
        return _stacked(g, taps, dy, c)
    return _tap_by_tap(g, taps, dy, c)


def _conv_dx(g: GraphBuilder, w: str, dy: str, c: Correlation) -> str:
    if c.window.points and c.groups == 1:
        swapped = [1, 0, *range(2, 2 + len(c.window.kernel))]
        return g("Conv", dy, g("Transpose", w, perm=swapped))
    if c.groups == 1 and c.window.turns and _is_thin(c):
        return _dx_by_taps(g, w, dy, c)
    return g("ConvTranspose", dy, w, group=c.groups, **c.window.transposed())


def _is_thin(c: Correlation) -> bool:
    """Whether a product a sample would have few positions and many channels."""
    small = math.prod(c.window.image) <= SMALL_IMAGE
    return small and c.batch > 1 and min(c.channels, c.features) >= MANY_CHANNELS


def _dx_by_taps(g: GraphBuilder, w: str, dy: str, c: Correlation) -> str:
    """For stride 1: one product a tap over the positions of all samples, added up.

    On small images with many channels ConvTranspose does a product a sample, each too thin.
    """
    window, rank = c.window, len(c.window.steps) + 2
    begin = [r - b for r, b in zip(window.reach, window.begin, strict=True)]
    end = [r - e for r, e in zip(window.reach, window.end, strict=True)]
    last = g("Transpose", dy, perm=[0, *range(2, rank), 1])
    padded = g("Pad", last, g.ints(0, *begin, 0, 0, *end, 0))
    count = math.prod(window.kernel)
    taps = g("Transpose", reshape(g, w, (c.features, c.channels, count)), perm=[2, 0, 1])
    axes = g.ints(*range(1, rank - 1))
    products = []
    for number, offset in enumerate(window.taps):
        ends = [o + extent for o, extent in zip(offset, window.image, strict=True)]
        moved = g("Slice", padded, g.ints(*offset), g.ints(*ends), axes)
        rows = reshape(g, moved, (-1, c.features))
        tap = g("Gather", taps, g.constant(count - 1 - number, np.int64), axis=0)
        products.append(g("MatMul", rows, tap))
    total = add_all(g, *products) or products[0]
    image = reshape(g, total, (c.batch, *window.image, c.channels))
    return g("Transpose", image, perm=[0, rank - 1, *range(1, rank - 1)])


def _tap(g: GraphBuilder, padded: str, offset: Shape, c: Correlation) -> str:
    return padded if c.window.points else c.window.tap(g, padded, offset)


def _tap_by_tap(g: GraphBuilder, taps: list[str], dy: str, c: Correlation) -> str:
    split = (c.batch,) if c.groups == 1 else (c.batch, c.groups)
    rank = len(split) + 2
    rows = reshape(g, dy, (*split, c.features // c.groups, c.positions))
    parts = []
    for tap in taps:
        columns = reshape(g, tap, (*split, c.channels // c.groups, c.positions))
        product = g("MatMul", rows, swap_last(g, columns, rank))
        parts.append(sum_axes(g, product, [0], keepdims=True) if c.batch > 1 else product)
    return _taps_last(g, parts, c)


def _joined(g: GraphBuilder, image: str, dy: str, c: Correlation) -> str:
    rank = len(c.window.steps) + 2
    last = g("Transpose", image, perm=[0, *range(2, rank), 1])
    padded = c.window.padded(g, last, first_axis=1)
    joined = (c.features, c.batch * c.positions)
    rows = reshape(g, g("Transpose", dy, perm=[1, 0, *range(2, rank)]), joined)
    parts = []
    for offset in c.window.taps:
        tap = c.window.tap(g, padded, offset, first_axis=1)
        columns = reshape(g, tap, (c.batch * c.positions, c.channels))
        parts.append(g("MatMul", rows, columns))
    return _taps_last(g, parts, c)


def _stacked(g: GraphBuilder, taps: list[str], dy: str, c: Correlation) -> str:
    stack = g("Concat", *taps, axis=1)
    stack = reshape(g, stack, (c.batch, len(taps) * c.channels, c.positions))
    rows = reshape(g, dy, (c.batch, c.features, c.positions))
    product = g("MatMul", stack, swap_last(g, rows, 3))
    total = sum_axes(g, product, [0]) if c.batch > 1 else product
    taps_first = reshape(g, total, (*c.window.kernel, c.channels, c.features))
    return _taps_innermost(g, taps_first, c, features_first=False)


def _depthwise(g: GraphBuilder, padded: str, dy: str, c: Correlation) -> str:
    positions = range(2, 2 + len(c.window.steps))
    parts = []
    for offset in c.window.taps:
        product = g("Mul", c.window.tap(g, padded, offset), dy)
        parts.append(sum_axes(g, product, positions))
    sums = reshape(g, g("Concat", *parts, axis=0), (len(parts), c.batch, c.channels))
    shape = (*c.window.kernel, *c.weight_shape[:2])
    return _taps_innermost(g, reshape(g, sum_axes(g, sums, [1]), shape), c)


def _depthwise_channels_last(g: GraphBuilder, padded: str, dy: str, c: Correlation) -> str:
    """As `_depthwise`, summing rows of [N * positions, C], which needs no strided reads."""
    rank = len(c.window.steps) + 2
    perm = [0, *range(2, rank), 1]
    image, dy = g("Transpose", padded, perm=perm), g("Transpose", dy, perm=perm)
    parts = []
    for offset in c.window.taps:
        tap = c.window.tap(g, image, offset, first_axis=1)
        rows = reshape(g, g("Mul", tap, dy), (c.batch * c.positions, c.channels))
        parts.append(sum_axes(g, rows, [0], keepdims=True))
    return _taps_last(g, parts, c)


def _taps_last(g: GraphBuilder, parts: list[str], c: Correlation) -> str:
    """Join the parts of all taps, of M * C / groups elements each, to a weight."""
    if len(parts) == 1:
        return reshape(g, parts[0], c.weight_shape)
    shape = (*c.window.kernel, *c.weight_shape[:2])
    taps_first = reshape(g, g("Concat", *parts, axis=0), shape)
    return _taps_innermost(g, taps_first, c)


def _taps_innermost(
    g: GraphBuilder, weight: str, c: Correlation, *, features_first: bool = True
) -> str:
    """From [*kernel, M, C / groups], or with these two exchanged, to a weight.

    No reshape comes after the transpose: ONNX Runtime would exchange the two, and a node
    that its optimizer puts in loses the place that `lean_order` gives a gradient.
    """
    taps = len(c.window.kernel)
    outer = [taps, taps + 1] if features_first else [taps + 1, taps]
    return g("Transpose", weight, perm=[*outer, *range(taps)])


def _conv_transpose_sizes(g: GraphBuilder, node: Node) -> Correlation:
    if "output_shape" in node.attributes and node.get("auto_pad", "NOTSET") == "NOTSET":
        # The standard pads as for SAME_LOWER where only the output's shape is given.
        node = replace(node, attributes={**node.attributes, "auto_pad": "SAME_LOWER"})
    x, w = (g.shape(name) for name in node.inputs[:2])
    y = g.shape(node.output)
    return Correlation(
        y[0], y[1], x[1], int(node.get("group", 1)), window(node, y[2:], x[2:], w[2:])
    )
