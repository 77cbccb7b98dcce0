"""DequantizeLinear, by its scale: the quantised values themselves stay as they are."""

from __future__ import annotations

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents
from edgetrain.compiler.rules.shaping import reshape, sum_axes


def dequantize_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y = (x - zero point) * scale, with one scale or one for each index of an axis."""
    x, scale = node.inputs[:2]
    shape = g.shape(scale)
    ones = g.constant(np.ones(shape, g.dtype(scale)))
    levels = g("DequantizeLinear", x, ones, *node.inputs[2:], **node.attributes)
    rank = g.rank(x)
    kept = {int(node.get("axis", 1)) % rank} if shape else set()
    axes = [axis for axis in range(rank) if axis not in kept]
    product = g("Mul", dy, levels)
    total = sum_axes(g, product, axes) if axes else product
    return None, reshape(g, total, shape)


def dequantize_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    """Linear in the scale: the op itself with the scale's tangent."""
    tscale = tangents[1]
    x, _, *zero = node.inputs
    return tscale and g("DequantizeLinear", x, tscale, *zero, **node.attributes)
