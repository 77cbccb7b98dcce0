"""Batch, layer and instance normalisation.

All of them standardise, xhat = (x - mean) / sqrt(variance + epsilon), then scale and
shift. With the statistics taken from x itself the derivative of xhat is the projection
v -> inv_std * (v - mean(v) - xhat * mean(v * xhat)), its own transpose. Here x is centred
before anything is multiplied by it, so that a mean far from zero costs no accuracy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents, add_all
from edgetrain.compiler.rules.shaping import (
    Shape,
    channel_sums,
    per_channel,
    reshape,
    reshape_from,
    scaled,
    sum_axes,
    sum_to,
)
from edgetrain.errors import UnsupportedOpError


def batch_norm_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Cotangents of x, scale and bias; in inference mode of the statistics too.

    In training mode the node's outputs 1 and 2 must be the batch's mean and variance,
    that is, its momentum 0. The per-channel affine map in dx is one pass of the inference
    kernel.
    """
    x, scale = node.inputs[:2]
    shape = g.shape(x)
    mean, inv_std = _batch_statistics(g, node)
    centred = g("Sub", x, per_channel(g, mean, len(shape)))
    rate = g("Mul", scale, inv_std)
    direct = g("Mul", dy, per_channel(g, rate, len(shape)))
    total = channel_sums(g, dy, shape)
    moment = g("Mul", channel_sums(g, g("Mul", dy, centred), shape), inv_std)
    if not node.get("training_mode", 0):
        dmean = g("Neg", g("Mul", rate, total))
        spread = g("Mul", g("Mul", rate, inv_std), moment)
        return direct, moment, total, dmean, scaled(g, spread, -0.5, x)
    count = math.prod(shape) // shape[1]
    share = scaled(g, rate, -1 / count, x)
    by_x, by_one = g("Mul", g("Mul", share, inv_std), moment), g("Mul", share, total)
    return g("Add", direct, channel_affine(g, centred, by_x, by_one, x)), moment, total


def batch_norm_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    """ty = scale * txhat + tscale * xhat + tbias."""
    x, scale = node.inputs[:2]
    tx, ts, tb, tmean, tvar = tangents
    rank = len(g.shape(x))
    mean, inv_std = _batch_statistics(g, node)
    xhat = g("Sub", x, per_channel(g, mean, rank))
    xhat = g("Mul", xhat, per_channel(g, inv_std, rank))
    if node.get("training_mode", 0):
        axes = [0, *range(2, rank)]
        txhat = tx and _project(g, tx, xhat, per_channel(g, inv_std, rank), axes)
    else:
        # inv_std = (var + epsilon)^-1/2, so its tangent is -1/2 * inv_std^3 * tvar.
        square = g("Mul", inv_std, inv_std)
        drift = tvar and scaled(g, g("Mul", square, tvar), -0.5, x)
        moved = tmean and g("Neg", per_channel(g, tmean, rank))
        shifted = add_all(g, tx, moved)
        txhat = add_all(
            g,
            shifted and g("Mul", shifted, per_channel(g, inv_std, rank)),
            drift and g("Mul", xhat, per_channel(g, drift, rank)),
        )
    terms = (
        txhat and g("Mul", txhat, per_channel(g, scale, rank)),
        ts and g("Mul", xhat, per_channel(g, ts, rank)),
        tb and per_channel(g, tb, rank),
    )
    total = add_all(g, *terms)
    return total and g("Expand", total, g.ints(*g.shape(x)))


def _batch_statistics(g: GraphBuilder, node: Node) -> tuple[str, str]:
    """Mean and reciprocal standard deviation per channel, [C] each.

    Raises:
        UnsupportedOpError: a training node does not yield the batch's own statistics.
    """
    mean, variance = node.inputs[3:5]
    if node.get("training_mode", 0):
        if len(node.outputs) < 3 or node.get("momentum", 0.9) != 0:
            raise UnsupportedOpError(
                node.op_type, node.name,
                "in training mode it needs momentum 0 and all three outputs",
            )  # fmt: skip
        mean, variance = node.outputs[1:3]
    return mean, _inv_std(g, variance, node, node.inputs[0])


def _inv_std(g: GraphBuilder, variance: str, node: Node, like: str) -> str:
    epsilon = g.scalar(float(node.get("epsilon", 1e-5)), like)
    return g("Reciprocal", g("Sqrt", g("Add", variance, epsilon)))


def channel_affine(g: GraphBuilder, value: str, factor: str, offset: str, like: str) -> str:
    """factor * value + offset per channel, in one pass: a normalisation of nothing."""
    zero = g.constant(np.zeros(g.shape(like)[1], g.dtype(like)))
    one = g.constant(np.ones(g.shape(like)[1], g.dtype(like)))
    return g("BatchNormalization", value, factor, offset, zero, one, epsilon=0.0)


def _project(g: GraphBuilder, v: str, xhat: str, inv_std: str, axes: Shape) -> str:
    """The derivative of standardising over `axes`, applied to v."""
    mean = g("ReduceMean", v, g.ints(*axes), keepdims=1)
    along = g("ReduceMean", g("Mul", v, xhat), g.ints(*axes), keepdims=1)
    inner = g("Sub", g("Sub", v, mean), g("Mul", xhat, along))
    return g("Mul", inner, inv_std)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A LayerNormalization seen as a matrix: R rows, each standardised over its D columns.

    Attributes:
        shape: R and D.
        scale: [D].
        xhat: [R, D].
        inv_std: [R, 1].
    """

    shape: tuple[int, int]
    scale: str
    xhat: str
    inv_std: str


def layer_norm_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """The two means over a row are products with scale / D: faster than reductions."""
    x, scale = node.inputs[:2]
    r = _layer_rows(g, node)
    dy = reshape_from(g, dy, g.shape(x), r.shape)
    weighted = g("Mul", dy, r.xhat)
    column = reshape(g, scaled(g, r.scale, 1 / r.shape[1], x), (r.shape[1], 1))
    mean, along = g("MatMul", dy, column), g("MatMul", weighted, column)
    inner = g("Sub", g("Mul", dy, r.scale), mean)
    dx = g("Mul", g("Sub", inner, g("Mul", r.xhat, along)), r.inv_std)
    dx = reshape_from(g, dx, r.shape, g.shape(x))
    parts = [dx, _affine_cotangent(g, node, weighted, scale)]
    if node.input(2):
        parts.append(_affine_cotangent(g, node, dy, node.inputs[2]))
    return tuple(parts)


def layer_norm_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    """ty = scale * txhat + tscale * xhat + tbias."""
    x = node.inputs[0]
    r = _layer_rows(g, node)
    tx, ts, tb = (*tangents, None)[:3]
    rows = tx and reshape_from(g, tx, g.shape(x), r.shape)
    txhat = rows and _project(g, rows, r.xhat, r.inv_std, [1])
    terms = (
        txhat and g("Mul", txhat, r.scale),
        ts and g("Mul", r.xhat, _as_columns(g, node, ts, node.inputs[1])),
        tb and _as_columns(g, node, tb, node.inputs[2]),
    )
    total = add_all(g, *terms)
    if total is None:
        return None
    total = g("Expand", total, g.ints(*r.shape))
    return reshape_from(g, total, r.shape, g.shape(x))


def layer_norm_axis(g: GraphBuilder, node: Node) -> int:
    """The first of the axes that a LayerNormalization standardises over."""
    return int(node.get("axis", -1)) % g.rank(node.inputs[0])


def _layer_rows(g: GraphBuilder, node: Node) -> _Rows:
    x, scale = node.inputs[:2]
    axis, shape = layer_norm_axis(g, node), g.shape(x)
    matrix = (math.prod(shape[:axis]), math.prod(shape[axis:]))
    rows = reshape_from(g, x, shape, matrix)
    if len(node.outputs) == 3:
        mean, inv_std = (reshape(g, s, (matrix[0], 1)) for s in node.outputs[1:])
        centred = g("Sub", rows, mean)
    else:
        centred, inv_std = _standardise(g, rows, node, x)
    xhat = g("Mul", centred, inv_std)
    return _Rows(matrix, _as_columns(g, node, scale, scale), xhat, inv_std)


def _standardise(g: GraphBuilder, rows: str, node: Node, like: str) -> tuple[str, str]:
    """Centre [R, D] by row and find the reciprocal standard deviations, [R, 1]."""
    centred = g("Sub", rows, g("ReduceMean", rows, g.ints(1), keepdims=1))
    variance = g("ReduceMean", g("Mul", centred, centred), g.ints(1), keepdims=1)
    return centred, _inv_std(g, variance, node, like)


def _as_columns(g: GraphBuilder, node: Node, value: str, primal: str) -> str:
    """Flatten a scale or bias, which may need broadcasting, to [D]."""
    normalised = g.shape(node.inputs[0])[layer_norm_axis(g, node) :]
    shape = g.shape(primal)
    if math.prod(shape) != math.prod(normalised):
        value, shape = g("Expand", value, g.ints(*normalised)), normalised
    return reshape_from(g, value, shape, (math.prod(normalised),))


def _affine_cotangent(g: GraphBuilder, node: Node, rows: str, primal: str) -> str:
    """Sum [R, D] over its rows, and over the axes along which the primal broadcasts."""
    normalised = g.shape(node.inputs[0])[layer_norm_axis(g, node) :]
    total, shape = sum_axes(g, rows, [0]), g.shape(primal)
    if math.prod(shape) == math.prod(normalised):
        return reshape_from(g, total, (math.prod(shape),), shape)
    padded = (*(1 for _ in range(len(shape) - len(normalised))), *normalised)
    return sum_to(g, reshape(g, total, padded), padded, shape)


def instance_norm_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Each channel of each sample is standardised over its positions."""
    x, scale = node.inputs[:2]
    xhat, inv_std = _instance_rows(g, node)
    n, channels, *image = g.shape(x)
    rows = (n, channels, math.prod(image))
    dy = reshape_from(g, dy, g.shape(x), rows)
    moment = channel_sums(g, g("Mul", dy, xhat), rows)
    projected = _project(g, dy, xhat, inv_std, [2])
    dx = g("Mul", projected, per_channel(g, scale, 3))
    return reshape(g, dx, g.shape(x)), moment, channel_sums(g, dy, rows)


def instance_norm_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    x, scale = node.inputs[:2]
    xhat, inv_std = _instance_rows(g, node)
    n, channels, *image = g.shape(x)
    rows = (n, channels, math.prod(image))
    tx, ts, tb = tangents
    moved = tx and _project(g, reshape(g, tx, rows), xhat, inv_std, [2])
    terms = (
        moved and g("Mul", moved, per_channel(g, scale, 3)),
        ts and g("Mul", xhat, per_channel(g, ts, 3)),
        tb and per_channel(g, tb, 3),
    )
    total = add_all(g, *terms)
    return total and reshape(g, g("Expand", total, g.ints(*rows)), g.shape(x))


def _instance_rows(g: GraphBuilder, node: Node) -> tuple[str, str]:
    """xhat as [N, C, positions] and the reciprocal deviations as [N, C, 1]."""
    x = node.inputs[0]
    n, channels, *image = g.shape(x)
    matrix = reshape(g, x, (n * channels, math.prod(image)))
    centred, inv_std = _standardise(g, matrix, node, x)
    inv_std = reshape(g, inv_std, (n, channels, 1))
    centred = reshape(g, centred, (n, channels, math.prod(image)))
    return g("Mul", centred, inv_std), inv_std
