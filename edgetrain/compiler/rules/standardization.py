"""Standardising in groups: GroupNormalization and MeanVarianceNormalization."""

from __future__ import annotations

import math
from dataclasses import replace

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents
from edgetrain.compiler.rules.normalization import instance_norm_jvp, instance_norm_vjp
from edgetrain.compiler.rules.shaping import mask, reshape
from edgetrain.errors import GraphError

# What the standard adds to a standard deviation.
_FLOOR = 1e-9


def group_norm_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """An InstanceNormalization with the channels of each group laid end to end.

    Scale and bias are one number a group, as in opsets 18 to 20.
    """
    instance, rows = _as_instance(g, node)
    dx, dscale, dbias = instance_norm_vjp(g, instance, reshape(g, dy, rows))
    return dx and reshape(g, dx, g.shape(node.inputs[0])), dscale, dbias


def group_norm_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    instance, rows = _as_instance(g, node)
    tx, *affine = tangents
    ty = instance_norm_jvp(g, instance, (tx and reshape(g, tx, rows), *affine))
    return ty and reshape(g, ty, g.shape(node.output))


def _as_instance(g: GraphBuilder, node: Node) -> tuple[Node, tuple[int, int, int]]:
    """The node on [N, groups, elements of a group], and that shape."""
    x = node.inputs[0]
    shape, groups = g.shape(x), int(node.attributes["num_groups"])
    rows = (shape[0], groups, math.prod(shape[1:]) // groups)
    view = reshape(g, x, rows)
    g.describe(view, g.dtype(x), rows)
    inputs = (view, *node.inputs[1:])
    return replace(node, op_type="InstanceNormalization", inputs=inputs), rows


def mean_variance_norm(g: GraphBuilder, node: Node, t: str) -> str:
    """y = c / (s + 1e-9) with c = x - mean(x) and s = sqrt(mean(c^2)).

    Its Jacobian is symmetric: v -> (v - mean(v)) / (s + 1e-9) - c * mean(c * v) / (s * (s
    + 1e-9)^2). Where x is constant, so that s is 0 and has no derivative, the second term
    is 0.
    """
    x = node.inputs[0]
    given, rank = list(node.get("axes", [0, 2, 3])), g.rank(x)
    if any(not -rank <= axis < rank for axis in given):
        raise GraphError(
            f"MeanVarianceNormalization node {node.name!r} takes means along axes"
            f" {given} of a value of {rank} dimensions; give it `axes` that the value has"
        )
    axes = g.ints(*given)

    def mean(value: str) -> str:
        return g("ReduceMean", value, axes, keepdims=1)

    centred = g("Sub", x, mean(x))
    deviation = g("Sqrt", mean(g("Mul", centred, centred)))
    flat = mask(g, "Equal", deviation, g.scalar(0, x), like=x)
    scale = g("Add", deviation, g.scalar(_FLOOR, x))
    along = g("Div", mean(g("Mul", centred, t)), g("Add", deviation, flat))
    bent = g("Mul", g("Div", centred, scale), along)
    return g("Div", g("Sub", g("Sub", t, mean(t)), bent), scale)
