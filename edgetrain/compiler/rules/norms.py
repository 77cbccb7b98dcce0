"""p-norms: LpNormalization, LpPool and GlobalLpPool.

A norm has no derivative where it is 0; the rules return 0 there. With p = 1 it has none by
an element that is 0 either; the rules return 0, the middle of what is possible.
"""

from __future__ import annotations

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents
from edgetrain.compiler.rules.shaping import mask, reshape, sum_axes
from edgetrain.compiler.rules.window import Window, window


def lp_norm_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y = x / n with n = |x|_p along an axis: dx = (dy - n'(x) * sum(dy * y)) / n."""
    y, axis = node.output, int(node.get("axis", -1))
    slope, inverse = _norm(g, node, axis)
    along = sum_axes(g, g("Mul", dy, y), [axis], keepdims=True)
    return (g("Mul", g("Sub", dy, g("Mul", slope, along)), inverse),)


def lp_norm_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    """ty = (tx - y * sum(n'(x) * tx)) / n."""
    (tx,), axis = tangents, int(node.get("axis", -1))
    if tx is None:
        return None
    slope, inverse = _norm(g, node, axis)
    along = sum_axes(g, g("Mul", slope, tx), [axis], keepdims=True)
    return g("Mul", g("Sub", tx, g("Mul", node.output, along)), inverse)


def _norm(g: GraphBuilder, node: Node, axis: int) -> tuple[str, str]:
    """The derivative of the norm, of x's shape, and the norm's reciprocal, 0 for 0."""
    x, y = node.inputs[0], node.output
    one = int(node.get("p", 2)) == 1
    norm = g("ReduceL1" if one else "ReduceL2", x, g.ints(axis), keepdims=1)
    void = mask(g, "Equal", norm, g.scalar(0, x), like=x)
    inverse = g("Div", g("Sub", g.scalar(1, x), void), g("Add", norm, void))
    return g("Sign", x) if one else y, inverse


def lp_pool_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y = (sum |x|^p)^(1/p) a window: dx = sign(x) |x|^(p-1) * sum of dy / y^(p-1)."""
    x, w = node.inputs[0], _pool_window(g, node)
    n, channels = g.shape(x)[:2]
    share = reshape(g, _over_power(g, node, dy), (n * channels, 1, *w.steps))
    spread = g("ConvTranspose", share, _ones(g, x, w), **w.transposed())
    return (g("Mul", _element_power(g, node), reshape(g, spread, g.shape(x))),)


def lp_pool_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    (tx,) = tangents
    if tx is None:
        return None
    x, w = node.inputs[0], _pool_window(g, node)
    n, channels, *image = g.shape(x)
    moved = g("Mul", _element_power(g, node), tx)
    planes = reshape(g, moved, (n * channels, 1, *image))
    sums = g("Conv", planes, _ones(g, x, w), **_covering(w))
    return _over_power(g, node, reshape(g, sums, g.shape(node.output)))


def global_lp_pool_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """One window over the whole image."""
    return (g("Mul", _element_power(g, node), _over_power(g, node, dy)),)


def global_lp_pool_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    (tx,) = tangents
    if tx is None:
        return None
    moved = g("Mul", _element_power(g, node), tx)
    axes = [*range(2, g.rank(node.output))]
    return _over_power(g, node, sum_axes(g, moved, axes, keepdims=True))


def _element_power(g: GraphBuilder, node: Node) -> str:
    """sign(x) * |x|^(p-1)."""
    x, p = node.inputs[0], int(node.get("p", 2))
    if p == 2:
        return x
    sign = g("Sign", x)
    return sign if p == 1 else g("Mul", sign, g("Pow", g("Abs", x), g.scalar(p - 1, x)))


def _over_power(g: GraphBuilder, node: Node, value: str) -> str:
    """value / y^(p-1), where y is not 0; where it is, all it multiplies is 0."""
    y, p = node.output, int(node.get("p", 2))
    if p == 1:
        return value
    filled = g("Add", y, mask(g, "Equal", y, g.scalar(0, y), like=y))
    return g("Div", value, filled if p == 2 else g("Pow", filled, g.scalar(p - 1, y)))


def _pool_window(g: GraphBuilder, node: Node) -> Window:
    image, steps = g.shape(node.inputs[0])[2:], g.shape(node.output)[2:]
    return window(node, image, steps, node.attributes["kernel_shape"])


def _ones(g: GraphBuilder, like: str, w: Window) -> str:
    return g.constant(np.ones((1, 1, *w.kernel)), g.dtype(like))


def _covering(w: Window) -> dict[str, list[int]]:
    """Attributes of the Conv with these windows; rounding up may add some past the end."""
    ends = []
    for axis, extent in enumerate(w.image):
        spread = (w.steps[axis] - 1) * w.strides[axis]
        reach = spread + (w.kernel[axis] - 1) * w.dilations[axis] + 1
        ends.append(max(0, reach - w.begin[axis] - extent))
    return {
        "kernel_shape": list(w.kernel),
        "strides": list(w.strides),
        "dilations": list(w.dilations),
        "pads": [*w.begin, *ends],
    }
