"""Pooling: averages are linear, and a maximum passes to its first winner, as in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edgetrain.compiler.build import Array, GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents
from edgetrain.compiler.rules.shaping import mask, repeated, reshape, scaled, zeros
from edgetrain.compiler.rules.window import Window, window


def max_pool_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Send each cotangent to the first maximum of its window.

    Windows that tile the image: multiply by a mask. Otherwise scatter to the flat indices
    that MaxPool yields on request; it is run again here, so that the forward graph keeps
    the fast kernel and the stash needs no 8-byte indices.
    """
    x = node.inputs[0]
    w = _pool_window(g, node)
    if w.tiles:
        return (g("Mul", _first_maximum(g, node, w), repeated(g, dy, w.kernel)),)
    size = math.prod(g.shape(x))
    indices = reshape(g, _indices(g, node), (-1,))
    flat = reshape(g, dy, (-1,))
    total = g(
        "ScatterElements", zeros(g, (size,), x), indices, flat, axis=0, reduction="add"
    )
    return (reshape(g, total, g.shape(x)),)


def max_pool_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    (tx,) = tangents
    if tx is None:
        return None
    w = _pool_window(g, node)
    if w.tiles:
        chosen = g("Mul", tx, _first_maximum(g, node, w))
        kernel = list(w.kernel)
        mean = g("AveragePool", chosen, kernel_shape=kernel, strides=kernel)
        return scaled(g, mean, math.prod(kernel), node.output)
    return g("Gather", reshape(g, tx, (-1,)), _indices(g, node))


def global_max_pool_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    shape = g.shape(node.inputs[0])
    rows = reshape(g, dy, (*shape[:2], 1))
    return (reshape(g, g("Mul", rows, _first_of_all(g, node)), shape),)


def global_max_pool_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    (tx,) = tangents
    if tx is None:
        return None
    shape = g.shape(node.inputs[0])
    chosen = g("Mul", reshape(g, tx, (*shape[:2], -1)), _first_of_all(g, node))
    return reshape(g, g("ReduceSum", chosen, g.ints(2)), g.shape(node.output))


def average_pool_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Spread each cotangent evenly over its window."""
    x = node.inputs[0]
    n, channels, *image = g.shape(x)
    w = _pool_window(g, node)
    if w.tiles:
        share = scaled(g, dy, 1 / math.prod(w.kernel), x)
        return (repeated(g, share, w.kernel),)
    weights = 1 / _window_sizes(w, padding=bool(node.get("count_include_pad", 0)))
    share = g("Mul", dy, g.constant(weights, g.dtype(x)))
    planes = reshape(g, share, (n * channels, 1, *w.steps))
    ones = g.constant(np.ones((1, 1, *w.kernel)), g.dtype(x))
    spread = g("ConvTranspose", planes, ones, **w.transposed())
    return (reshape(g, spread, (n, channels, *image)),)


def global_average_pool_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    shape = g.shape(node.inputs[0])
    share = scaled(g, dy, 1 / math.prod(shape[2:]), node.output)
    return (g("Expand", share, g.ints(*shape)),)


def _pool_window(g: GraphBuilder, node: Node) -> Window:
    image, steps = g.shape(node.inputs[0])[2:], g.shape(node.output)[2:]
    return window(node, image, steps, node.attributes["kernel_shape"])


def _indices(g: GraphBuilder, node: Node) -> str:
    """Positions of the maxima in the flat input."""
    attributes = {k: v for k, v in node.attributes.items() if k != "storage_order"}
    return g.multi("MaxPool", node.inputs[0], outputs=2, **attributes)[1]


def _first_maximum(g: GraphBuilder, node: Node, w: Window) -> str:
    """1.0 at the first maximum of each tile, else 0.0; of the input's shape.

    Equality alone would mark every maximum of a tile that has several, and a flat
    background makes such tiles common. So each maximum gets a rank that falls along its
    tile, and the highest rank stays.
    """
    x, y = node.inputs[0], node.output
    attained = mask(g, "Equal", x, repeated(g, y, w.kernel), like=x)
    tile = np.arange(math.prod(w.kernel), 0, -1).reshape(w.kernel)
    ranks = g.constant(np.tile(tile, w.steps)[None, None], g.dtype(x))
    ranked = g("Mul", attained, ranks)
    kernel = list(w.kernel)
    best = g("MaxPool", ranked, kernel_shape=kernel, strides=kernel)
    return mask(g, "Equal", ranked, repeated(g, best, w.kernel), like=x)


def _first_of_all(g: GraphBuilder, node: Node) -> str:
    """1.0 at the first maximum of each [N, C] row, as [N, C, positions]."""
    x = node.inputs[0]
    shape = g.shape(x)
    rows = reshape(g, x, (*shape[:2], -1))
    winner = g("ArgMax", rows, axis=2)
    return mask(g, "Equal", winner, g.ints(*range(math.prod(shape[2:]))), like=x)


def _window_sizes(w: Window, *, padding: bool) -> Array:
    """How many elements each window averages, as [1, 1, *steps]."""
    sizes = np.ones((1, 1), np.float64)
    for axis in range(len(w.kernel)):
        sizes = np.multiply.outer(sizes, _sizes_along(w, axis, padding=padding))
    return sizes.reshape(1, 1, *w.steps)


def _sizes_along(w: Window, axis: int, *, padding: bool) -> Sequence[int]:
    low = -w.begin[axis] if padding else 0
    high = w.image[axis] + (w.end[axis] if padding else 0)
    sizes = []
    for step in range(w.steps[axis]):
        start = step * w.strides[axis] - w.begin[axis]
        taps = (start + k * w.dilations[axis] for k in range(w.kernel[axis]))
        sizes.append(sum(low <= t < high for t in taps))
    return sizes
