"""Relatives of the linear unit: exponential, thresholded, shrinking and smooth ones."""

from __future__ import annotations

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.shaping import mask, scaled
from edgetrain.errors import UnsupportedOpError

# The standard's own defaults, to the digits it gives.
_SELU_ALPHA = 1.67326319217681884765625
_SELU_GAMMA = 1.05070102214813232421875


def selu(g: GraphBuilder, node: Node, t: str) -> str:
    """dy/dx is gamma above zero and y + gamma * alpha at zero and below.

    Raises:
        UnsupportedOpError: gamma or alpha is negative, so that y does not tell the side.
    """
    alpha = float(node.get("alpha", _SELU_ALPHA))
    gamma = float(node.get("gamma", _SELU_GAMMA))
    if alpha < 0 or gamma < 0:
        raise UnsupportedOpError(
            node.op_type, node.name,
            f"its alpha is {alpha} and its gamma {gamma}; neither may be negative",
        )  # fmt: skip
    y = node.output
    above = mask(g, "Greater", y, g.scalar(0, y), like=y)
    below = g("Add", g("Min", y, g.scalar(0, y)), g.scalar(gamma * alpha, y))
    return g("Mul", t, g("Add", scaled(g, above, gamma * (1 - alpha), y), below))


def celu(g: GraphBuilder, node: Node, t: str) -> str:
    """dy/dx is 1 above zero and exp(x / alpha) = 1 + y / alpha below: it is continuous."""
    y, alpha = node.output, float(node.get("alpha", 1.0))
    below = scaled(g, g("Min", y, g.scalar(0, y)), 1 / alpha, y)
    return g("Mul", t, g("Add", below, g.scalar(1, y)))


def softsign(g: GraphBuilder, node: Node, t: str) -> str:
    """y = x / (1 + |x|): dy/dx = 1 / (1 + |x|)^2."""
    x = node.inputs[0]
    base = g("Add", g.scalar(1, x), g("Abs", x))
    return g("Div", t, g("Mul", base, base))


def mish(g: GraphBuilder, node: Node, t: str) -> str:
    """y = x * th with th = tanh(softplus(x)): dy/dx = th + x * (1 - th^2) * sigmoid(x)."""
    x = node.inputs[0]
    th = g("Tanh", g("Softplus", x))
    rest = g("Sub", g.scalar(1, x), g("Mul", th, th))
    bent = g("Mul", g("Mul", x, rest), g("Sigmoid", x))
    return g("Mul", t, g("Add", th, bent))


def thresholded_relu(g: GraphBuilder, node: Node, t: str) -> str:
    """y = x above alpha, else 0; at alpha itself, where y jumps, the slope is 0."""
    x = node.inputs[0]
    threshold = g.scalar(float(node.get("alpha", 1.0)), x)
    return g("Mul", t, mask(g, "Greater", x, threshold, like=x))


def shrink(g: GraphBuilder, node: Node, t: str) -> str:
    """y = x +- bias outside [-lambd, lambd], else 0; the slope is 1 outside, else 0."""
    x = node.inputs[0]
    bound = g.scalar(float(node.get("lambd", 0.5)), x)
    below = g("Less", x, g("Neg", bound))
    return g("Mul", t, mask(g, "Or", below, g("Greater", x, bound), like=x))
