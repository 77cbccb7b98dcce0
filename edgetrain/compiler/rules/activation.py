"""Activation functions, from their outputs where that spares stashing the input."""

from __future__ import annotations

import math

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents, add_all
from edgetrain.compiler.rules.shaping import mask, scaled, sum_axes, to_type
from edgetrain.errors import UnsupportedOpError


def relu(g: GraphBuilder, node: Node, t: str) -> str:
    y = node.output
    return g("Mul", t, mask(g, "Greater", y, g.scalar(0, y), like=y))


def leaky_relu(g: GraphBuilder, node: Node, t: str) -> str:
    """The slope is read off the sign of y, which is that of x as alpha >= 0."""
    alpha, y = _positive(node, 0.01), node.output
    kept = scaled(g, mask(g, "Greater", y, g.scalar(0, y), like=y), 1 - alpha, y)
    return g("Mul", t, g("Add", kept, g.scalar(alpha, y)))


def elu(g: GraphBuilder, node: Node, t: str) -> str:
    """dy/dx is 1 above zero and y + alpha below."""
    alpha, y = _positive(node, 1.0), node.output
    above = mask(g, "Greater", y, g.scalar(0, y), like=y)
    below = g("Add", g("Min", y, g.scalar(0, y)), g.scalar(alpha, y))
    return g("Mul", t, g("Add", scaled(g, above, 1 - alpha, y), below))


def _positive(node: Node, default: float) -> float:
    alpha = float(node.get("alpha", default))
    if alpha < 0:
        raise UnsupportedOpError(
            node.op_type, node.name, f"its alpha is {alpha}; only alpha >= 0 is supported"
        )
    return alpha


def tanh(g: GraphBuilder, node: Node, t: str) -> str:
    """dy/dx = 1 - y^2."""
    y = node.output
    return g("Sub", t, g("Mul", t, g("Mul", y, y)))


def sigmoid(g: GraphBuilder, node: Node, t: str) -> str:
    """dy/dx = y * (1 - y)."""
    y = node.output
    return g("Mul", t, g("Mul", y, g("Sub", g.scalar(1, y), y)))


def softplus(g: GraphBuilder, node: Node, t: str) -> str:
    return g("Mul", t, g("Sigmoid", node.inputs[0]))


def hard_sigmoid(g: GraphBuilder, node: Node, t: str) -> str:
    """y = clip(alpha * x + beta, 0, 1)."""
    y = node.output
    inside = _inside(g, y, g.scalar(0, y), g.scalar(1, y))
    return g("Mul", t, scaled(g, inside, float(node.get("alpha", 0.2)), y))


def hard_swish(g: GraphBuilder, node: Node, t: str) -> str:
    """y = x * gate with gate = clip(x / 6 + 1/2, 0, 1)."""
    x = node.inputs[0]
    gate = g("HardSigmoid", x, alpha=1 / 6, beta=0.5)
    slope = scaled(g, _inside(g, gate, g.scalar(0, x), g.scalar(1, x)), 1 / 6, x)
    return g("Mul", t, g("Add", gate, g("Mul", x, slope)))


def _inside(g: GraphBuilder, value: str, low: str, high: str) -> str:
    """1.0 strictly between the bounds; they have the type of `value`."""
    return mask(g, "And", g("Greater", value, low), g("Less", value, high), like=low)


def clip_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Zero at the bounds and beyond, as PyTorch has it for ReLU6."""
    inside, below, above = _clip_masks(g, node)
    return tuple(m and g("Mul", dy, m) for m in (inside, below, above))


def clip_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    terms = zip(tangents, _clip_masks(g, node), strict=False)
    return add_all(g, *(t and m and g("Mul", t, m) for t, m in terms))


def _clip_masks(g: GraphBuilder, node: Node) -> tuple[str, str | None, str | None]:
    y, low, high = node.output, node.input(1), node.input(2)
    above = high and mask(g, "GreaterOrEqual", y, high, like=y)
    if low and high:
        # Bounds that cross give the upper one everywhere.
        at_low = g("And", g("LessOrEqual", y, low), g("Less", low, high))
        return _inside(g, y, low, high), to_type(g, at_low, y), above
    below = low and mask(g, "LessOrEqual", y, low, like=y)
    outside = below or above
    inside = g.scalar(1, y)
    return g("Sub", inside, outside) if outside else inside, below or None, above or None


def prelu_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y = x above zero, slope * x below."""
    above, below = _prelu_masks(g, node)
    x, slope = node.inputs
    dy_below = g("Mul", dy, below)
    dx = g("Add", g("Mul", dy, above), g("Mul", dy_below, slope))
    return dx, g("Mul", dy_below, x)


def prelu_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    above, below = _prelu_masks(g, node)
    (x, slope), (tx, ts) = node.inputs, tangents
    factor = g("Add", above, g("Mul", below, slope))
    return add_all(g, tx and g("Mul", tx, factor), ts and g("Mul", ts, g("Mul", below, x)))


def _prelu_masks(g: GraphBuilder, node: Node) -> tuple[str, str]:
    x = node.inputs[0]
    above = mask(g, "Greater", x, g.scalar(0, x), like=x)
    return above, g("Sub", g.scalar(1, x), above)


def gelu(g: GraphBuilder, node: Node, t: str) -> str:
    if node.get("approximate", "none") == "tanh":
        return g("Mul", t, _gelu_tanh_slope(g, node.inputs[0]))
    return g("Mul", t, _gelu_slope(g, node.inputs[0]))


def _gelu_slope(g: GraphBuilder, x: str) -> str:
    """y = x * Phi(x): dy/dx = Phi(x) + x * phi(x), Phi the normal distribution."""
    lifted = g("Add", g("Erf", scaled(g, x, math.sqrt(0.5), x)), g.scalar(1, x))
    bell = g("Exp", scaled(g, g("Mul", x, x), -0.5, x))
    density = scaled(g, bell, 1 / math.sqrt(2 * math.pi), x)
    return g("Add", scaled(g, lifted, 0.5, x), g("Mul", x, density))


def _gelu_tanh_slope(g: GraphBuilder, x: str) -> str:
    """y = x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (x + 0.044715 * x^3)."""
    rate, cubic = math.sqrt(2 / math.pi), 0.044715
    square, one = g("Mul", x, x), g.scalar(1, x)
    inner = g("Mul", x, g("Add", one, scaled(g, square, cubic, x)))
    th = g("Tanh", scaled(g, inner, rate, x))
    du = scaled(g, g("Add", one, scaled(g, square, 3 * cubic, x)), rate, x)
    bent = g("Mul", g("Mul", x, du), g("Sub", one, g("Mul", th, th)))
    return scaled(g, g("Add", g("Add", one, th), bent), 0.5, x)


def softmax(g: GraphBuilder, node: Node, t: str) -> str:
    """The Jacobian diag(y) - y y^T along the axis is symmetric."""
    y = node.output
    weighted = g("Mul", t, y)
    total = sum_axes(g, weighted, [node.get("axis", -1)], keepdims=True)
    return g("Sub", weighted, g("Mul", y, total))


def log_softmax_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """dx = dy - softmax(x) * sum(dy)."""
    total = sum_axes(g, dy, [node.get("axis", -1)], keepdims=True)
    return (g("Sub", dy, g("Mul", g("Exp", node.output), total)),)


def log_softmax_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    """ty = tx - sum(softmax(x) * tx)."""
    (tx,) = tangents
    if tx is None:
        return None
    weighted = g("Mul", g("Exp", node.output), tx)
    return g("Sub", tx, sum_axes(g, weighted, [node.get("axis", -1)], keepdims=True))
