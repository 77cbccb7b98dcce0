"""Arithmetic and other element-wise operators; most follow numpy's broadcasting."""

from __future__ import annotations

import math

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents, add_all
from edgetrain.compiler.rules.shaping import mask, scaled, to_type


def add_vjp(_g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y = a + b + ...: every input's cotangent is dy. Serves Add and Sum."""
    return tuple(dy for _ in node.inputs)


def add_jvp(g: GraphBuilder, _node: Node, tangents: Tangents) -> str | None:
    return add_all(g, *tangents)


def mean_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """The element-wise mean of n inputs: dy / n each."""
    share = scaled(g, dy, 1 / len(node.inputs), node.output)
    return tuple(share for _ in node.inputs)


def mean_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    total = add_all(g, *tangents)
    return total and scaled(g, total, 1 / len(node.inputs), node.output)


def sub_vjp(g: GraphBuilder, _node: Node, dy: str) -> Cotangents:
    return dy, g("Neg", dy)


def sub_jvp(g: GraphBuilder, _node: Node, tangents: Tangents) -> str | None:
    ta, tb = tangents
    if ta and tb:
        return g("Sub", ta, tb)
    return ta or (tb and g("Neg", tb))


def mul_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    a, b = node.inputs
    return g("Mul", dy, b), g("Mul", dy, a)


def mul_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    (a, b), (ta, tb) = node.inputs, tangents
    return add_all(g, ta and g("Mul", ta, b), tb and g("Mul", a, tb))


def div_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y = a / b: da = dy / b, db = -da * y."""
    da = g("Div", dy, node.inputs[1])
    return da, g("Neg", g("Mul", da, node.output))


def div_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    """ty = (ta - y * tb) / b."""
    ta, tb = tangents
    moved = tb and g("Neg", g("Mul", node.output, tb))
    total = add_all(g, ta, moved)
    return total and g("Div", total, node.inputs[1])


def mod_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y = a - n * b with n = trunc(a / b): da = dy, db = -n * dy.

    Where a / b is a whole number y jumps, and the slopes are those of one side.
    """
    return dy, g("Neg", g("Mul", dy, _quotient(g, node)))


def mod_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    ta, tb = tangents
    return add_all(g, ta, tb and g("Neg", g("Mul", tb, _quotient(g, node))))


def _quotient(g: GraphBuilder, node: Node) -> str:
    a, b = node.inputs
    return g("Round", g("Div", g("Sub", a, node.output), b))


def neg(g: GraphBuilder, _node: Node, t: str) -> str:
    return g("Neg", t)


def absolute(g: GraphBuilder, node: Node, t: str) -> str:
    return g("Mul", t, g("Sign", node.inputs[0]))


def sqrt(g: GraphBuilder, node: Node, t: str) -> str:
    return g("Div", scaled(g, t, 0.5, node.output), node.output)


def reciprocal(g: GraphBuilder, node: Node, t: str) -> str:
    """y = 1 / x: dy/dx = -y^2."""
    return g("Neg", g("Mul", t, g("Mul", node.output, node.output)))


def exp(g: GraphBuilder, node: Node, t: str) -> str:
    return g("Mul", t, node.output)


def log(g: GraphBuilder, node: Node, t: str) -> str:
    return g("Div", t, node.inputs[0])


def sin(g: GraphBuilder, node: Node, t: str) -> str:
    return g("Mul", t, g("Cos", node.inputs[0]))


def cos(g: GraphBuilder, node: Node, t: str) -> str:
    return g("Neg", g("Mul", t, g("Sin", node.inputs[0])))


def erf(g: GraphBuilder, node: Node, t: str) -> str:
    """dy/dx = 2 / sqrt(pi) * exp(-x^2)."""
    x = node.inputs[0]
    bell = g("Exp", g("Neg", g("Mul", x, x)))
    return g("Mul", t, scaled(g, bell, 2 / math.sqrt(math.pi), x))


def identity(_g: GraphBuilder, _node: Node, t: str) -> str:
    return t


def cast_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """A cotangent has its primal's type."""
    return (to_type(g, dy, node.inputs[0]),)


def pow_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """y = x^p: dx = dy * p * x^(p-1), dp = dy * y * log(x)."""
    dp = to_type(g, g("Mul", dy, _pow_by_exponent(g, node)), node.inputs[1])
    return g("Mul", dy, _pow_by_base(g, node)), dp


def pow_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    tx, tp = tangents
    return add_all(
        g,
        tx and g("Mul", tx, _pow_by_base(g, node)),
        tp and g("Mul", to_type(g, tp, node.output), _pow_by_exponent(g, node)),
    )


def _pow_by_base(g: GraphBuilder, node: Node) -> str:
    x, p = node.inputs
    if not g.is_constant(p):
        exponent = to_type(g, p, x)
        return g("Mul", exponent, g("Pow", x, g("Sub", exponent, g.scalar(1, x))))
    powers = g.value(p).astype(g.dtype(x))
    if np.all(powers == 2):
        return g("Mul", x, g.constant(powers))
    return g("Mul", g.constant(powers), g("Pow", x, g.constant(powers - 1)))


def _pow_by_exponent(g: GraphBuilder, node: Node) -> str:
    # The floor makes the slope 0 at a base of 0, where y * log(x) would be 0 * -inf.
    floor = g.scalar(float(np.finfo(g.dtype(node.output)).tiny), node.output)
    return g("Mul", node.output, g("Log", g("Max", node.inputs[0], floor)))


def where_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    da = g("Mul", dy, to_type(g, node.inputs[0], node.output))
    return None, da, g("Sub", dy, da)


def where_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    _, ta, tb = tangents
    chosen = to_type(g, node.inputs[0], node.output)
    rest = g("Sub", g.scalar(1, node.output), chosen)
    return add_all(g, ta and g("Mul", ta, chosen), tb and g("Mul", tb, rest))


def extremum_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Max or Min of n inputs; inputs that tie share the cotangent evenly."""
    masks, ties = _attained(g, node)
    share = g("Div", dy, ties)
    return tuple(g("Mul", share, m) for m in masks)


def extremum_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    masks, ties = _attained(g, node)
    terms = [t and g("Mul", t, m) for t, m in zip(tangents, masks, strict=True)]
    total = add_all(g, *terms)
    return total and g("Div", total, ties)


def _attained(g: GraphBuilder, node: Node) -> tuple[list[str], str]:
    """Where each input equals the output, and how many do."""
    y = node.output
    masks = [mask(g, "Equal", x, y, like=y) for x in node.inputs]
    return masks, add_all(g, *masks) or masks[0]
