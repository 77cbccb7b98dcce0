"""Trigonometric and hyperbolic functions beyond Sin, Cos and Tanh, and their inverses.

Where a slope has a pole (Asin and Acos at -1 and 1, Acosh at 1, Atanh at -1 and 1) the
rule returns infinity, as the limit is.
"""

from __future__ import annotations

from edgetrain.compiler.build import GraphBuilder, Node


def tan(g: GraphBuilder, node: Node, t: str) -> str:
    """dy/dx = 1 + y^2."""
    y = node.output
    return g("Add", t, g("Mul", t, g("Mul", y, y)))


def asin(g: GraphBuilder, node: Node, t: str) -> str:
    """dy/dx = 1 / sqrt(1 - x^2)."""
    return g("Div", t, g("Sqrt", _one_minus_square(g, node.inputs[0])))


def acos(g: GraphBuilder, node: Node, t: str) -> str:
    return g("Neg", asin(g, node, t))


def atan(g: GraphBuilder, node: Node, t: str) -> str:
    """dy/dx = 1 / (1 + x^2)."""
    return g("Div", t, _one_plus_square(g, node.inputs[0]))


def sinh(g: GraphBuilder, node: Node, t: str) -> str:
    return g("Mul", t, g("Cosh", node.inputs[0]))


def cosh(g: GraphBuilder, node: Node, t: str) -> str:
    return g("Mul", t, g("Sinh", node.inputs[0]))


def asinh(g: GraphBuilder, node: Node, t: str) -> str:
    """dy/dx = 1 / sqrt(1 + x^2)."""
    return g("Div", t, g("Sqrt", _one_plus_square(g, node.inputs[0])))


def acosh(g: GraphBuilder, node: Node, t: str) -> str:
    """dy/dx = 1 / sqrt(x^2 - 1)."""
    return g("Div", t, g("Sqrt", g("Neg", _one_minus_square(g, node.inputs[0]))))


def atanh(g: GraphBuilder, node: Node, t: str) -> str:
    """dy/dx = 1 / (1 - x^2)."""
    return g("Div", t, _one_minus_square(g, node.inputs[0]))


def _one_plus_square(g: GraphBuilder, x: str) -> str:
    return g("Add", g.scalar(1, x), g("Mul", x, x))


def _one_minus_square(g: GraphBuilder, x: str) -> str:
    """(1 - x)(1 + x), which near 1 keeps the digits that 1 - x^2 loses."""
    one = g.scalar(1, x)
    return g("Mul", g("Sub", one, x), g("Add", one, x))
