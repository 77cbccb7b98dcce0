"""Reductions over axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents
from edgetrain.compiler.rules.shaping import mask, reshape_from, scaled, sum_axes
from edgetrain.errors import UnsupportedOpError


@dataclass(frozen=True, slots=True)
class _Axes:
    """What a reduction sums over, and its output's shape with those axes kept as 1."""

    axes: tuple[int, ...]
    kept: tuple[int, ...]
    count: int


def _axes(g: GraphBuilder, node: Node) -> _Axes:
    shape = g.shape(node.inputs[0])
    rank = len(shape)
    given = g.value(node.input(1)).ravel().tolist() if node.input(1) else []
    if not given and not node.get("noop_with_empty_axes", 0):
        given = list(range(rank))
    axes = tuple(sorted(a % rank for a in given))
    kept = tuple(1 if i in axes else n for i, n in enumerate(shape))
    return _Axes(axes, kept, math.prod(shape[a] for a in axes))


def _keep(g: GraphBuilder, node: Node, value: str, axes: _Axes) -> str:
    """Give a value of the output's shape its reduced axes back, as extents of 1."""
    return reshape_from(g, value, g.shape(node.output), axes.kept)


def _drop(g: GraphBuilder, node: Node, value: str, axes: _Axes) -> str:
    return reshape_from(g, value, axes.kept, g.shape(node.output))


def sum_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    axes = _axes(g, node)
    shape = g.shape(node.inputs[0])
    dy = _keep(g, node, dy, axes)
    return (g("Expand", dy, g.ints(*shape)) if axes.kept != shape else dy,)


def mean_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    return sum_vjp(g, node, scaled(g, dy, 1 / _axes(g, node).count, node.output))


def extremum_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """ReduceMax or ReduceMin; elements that tie share the cotangent evenly."""
    axes = _axes(g, node)
    return (g("Mul", _keep(g, node, dy, axes), _shares(g, node, axes)),)


def extremum_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    if tangents[0] is None:
        return None
    axes = _axes(g, node)
    return _sum(g, node, g("Mul", tangents[0], _shares(g, node, axes)), axes)


def _shares(g: GraphBuilder, node: Node, axes: _Axes) -> str:
    x = node.inputs[0]
    attained = mask(g, "Equal", x, _keep(g, node, node.output, axes), like=x)
    if not axes.axes:
        return attained
    return g("Div", attained, sum_axes(g, attained, axes.axes, keepdims=True))


def _sum(g: GraphBuilder, node: Node, value: str, axes: _Axes) -> str:
    total = sum_axes(g, value, axes.axes, keepdims=True) if axes.axes else value
    return _drop(g, node, total, axes)


def slope_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """A reduction whose derivative by each element is known: dy, broadcast, times it."""
    axes = _axes(g, node)
    return (g("Mul", _slope(g, node, axes), _keep(g, node, dy, axes)),)


def slope_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    if tangents[0] is None:
        return None
    axes = _axes(g, node)
    return _sum(g, node, g("Mul", tangents[0], _slope(g, node, axes)), axes)


def _slope(g: GraphBuilder, node: Node, axes: _Axes) -> str:
    """The derivative of the output by each element, of the input's shape.

    Raises:
        UnsupportedOpError: no axes; engines differ on what that means.
    """
    if not axes.axes:
        raise UnsupportedOpError(
            node.op_type, node.name, "it reduces no axis; replace it by what it stands for"
        )
    x = node.inputs[0]
    y = _keep(g, node, node.output, axes)
    match node.op_type:
        case "ReduceL1":
            return g("Sign", x)
        case "ReduceSumSquare":
            return scaled(g, x, 2, x)
        case "ReduceLogSumExp":
            return g("Exp", g("Sub", x, y))
        case "ReduceLogSum":
            return g("Expand", g("Exp", g("Neg", y)), g.ints(*g.shape(x)))
        case "ReduceProd":
            return _product_slope(g, x, axes)
        case _:
            # ReduceL2: x / y. Where y is 0 so is x, and a slope of 0 is wanted, not NaN.
            return g("Div", x, g("Add", y, mask(g, "Equal", y, g.scalar(0, x), like=x)))


def _product_slope(g: GraphBuilder, x: str, axes: _Axes) -> str:
    """The product of the other elements, which is not y / x where x is 0."""
    zero = g.scalar(0, x)
    void = mask(g, "Equal", x, zero, like=x)
    filled = g("Add", x, void)
    product = g("ReduceProd", filled, g.ints(*axes.axes), keepdims=1)
    others = g("Sub", sum_axes(g, void, axes.axes, keepdims=True), void)
    alone = mask(g, "Equal", others, zero, like=x)
    return g("Mul", g("Div", product, filled), alone)
