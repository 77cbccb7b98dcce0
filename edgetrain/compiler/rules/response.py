"""Local response normalisation across channels."""

from __future__ import annotations

import math

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents
from edgetrain.compiler.rules.shaping import reshape, scaled
from edgetrain.errors import UnsupportedOpError


def lrn_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y = x * s^-beta with s = bias + alpha * mean of x^2 over a window of channels.

    dx = dy * s^-beta - 2 * alpha * beta * x * M(dy * y / s), M the window mean.
    """
    x, beta = node.inputs[0], float(node.get("beta", 0.75))
    base = _base(g, node)
    direct = g("Mul", dy, g("Pow", base, g.scalar(-beta, x)))
    spread = _mean(g, node, g("Div", g("Mul", dy, node.output), base))
    rate = -2 * float(node.get("alpha", 1e-4)) * beta
    return (g("Add", direct, scaled(g, g("Mul", x, spread), rate, x)),)


def lrn_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    """ty = tx * s^-beta - 2 * alpha * beta * y / s * M(x * tx)."""
    (tx,) = tangents
    if tx is None:
        return None
    x, beta = node.inputs[0], float(node.get("beta", 0.75))
    base = _base(g, node)
    direct = g("Mul", tx, g("Pow", base, g.scalar(-beta, x)))
    moved = g("Mul", g("Div", node.output, base), _mean(g, node, g("Mul", x, tx)))
    rate = -2 * float(node.get("alpha", 1e-4)) * beta
    return g("Add", direct, scaled(g, moved, rate, x))


def _base(g: GraphBuilder, node: Node) -> str:
    x = node.inputs[0]
    mean = _mean(g, node, g("Mul", x, x))
    alpha, bias = float(node.get("alpha", 1e-4)), float(node.get("bias", 1.0))
    return g("Add", scaled(g, mean, alpha, x), g.scalar(bias, x))


def _mean(g: GraphBuilder, node: Node, value: str) -> str:
    """Average over a window of channels, as a pool along a spatial axis.

    Places past the first and the last channel count as zeros.

    Raises:
        UnsupportedOpError: the window is even; ONNX Runtime does not run it either.
    """
    n, channels, *image = g.shape(node.inputs[0])
    size = int(node.attributes["size"])
    if size % 2 == 0:
        raise UnsupportedOpError(
            node.op_type, node.name, f"its size is {size}; only odd sizes are supported"
        )
    reach = size // 2
    rows = reshape(g, value, (n, 1, channels, math.prod(image)))
    mean = g(
        "AveragePool", rows, kernel_shape=[size, 1], strides=[1, 1],
        pads=[reach, 0, reach, 0], count_include_pad=1,
    )  # fmt: skip
    return reshape(g, mean, g.shape(node.inputs[0]))
