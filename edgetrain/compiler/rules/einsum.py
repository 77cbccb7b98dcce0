"""Einsum, with an ellipsis and broadcasting too."""

from __future__ import annotations

import string
from dataclasses import dataclass

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents, add_all
from edgetrain.compiler.rules.shaping import reshape_from
from edgetrain.errors import UnsupportedOpError

_ELLIPSIS = "..."


@dataclass(frozen=True, slots=True)
class _Equation:
    """An equation with a letter for every axis.

    Attributes:
        terms: letters of each operand.
        result: letters of the output.
        extents: of every letter, after broadcasting.
    """

    terms: tuple[str, ...]
    result: str
    extents: dict[str, int]


def einsum_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """The cotangent of an operand is an Einsum of dy with the other operands.

    An index that only this operand has was summed away, so it is brought back by a
    vector of ones. An axis of extent 1 that is broadcast counts as absent.

    Raises:
        UnsupportedOpError: an index twice in one term.
    """
    equation = _read(g, node)
    shapes = [g.shape(x) for x in node.inputs]
    own = [
        "".join(c for c, n in zip(term, shape, strict=True) if n == equation.extents[c])
        for term, shape in zip(equation.terms, shapes, strict=True)
    ]
    extents = [tuple(equation.extents[c] for c in term) for term in own]
    views = [
        reshape_from(g, x, shape, extent)
        for x, shape, extent in zip(node.inputs, shapes, extents, strict=True)
    ]
    cotangents = []
    for i, term in enumerate(own):
        operands = [dy, *views[:i], *views[i + 1 :]]
        indices = [equation.result, *own[:i], *own[i + 1 :]]
        for letter in term:
            if letter not in "".join(indices):
                ones = np.ones(equation.extents[letter], g.dtype(node.output))
                operands.append(g.constant(ones))
                indices.append(letter)
        dx = g("Einsum", *operands, equation=f"{','.join(indices)}->{term}")
        cotangents.append(reshape_from(g, dx, extents[i], shapes[i]))
    return tuple(cotangents)


def einsum_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    """Linear in each operand: one Einsum a tangent."""
    _read(g, node)
    terms = []
    for i, tangent in enumerate(tangents):
        if tangent:
            operands = [*node.inputs[:i], tangent, *node.inputs[i + 1 :]]
            terms.append(g("Einsum", *operands, **node.attributes))
    return add_all(g, *terms)


def _read(g: GraphBuilder, node: Node) -> _Equation:
    text = str(node.get("equation", "")).replace(" ", "")
    left, arrow, result = text.partition("->")
    written = left.split(",")
    shapes = [g.shape(x) for x in node.inputs]
    ranks = [
        len(shape) - len(term.replace(_ELLIPSIS, "")) if _ELLIPSIS in term else 0
        for term, shape in zip(written, shapes, strict=True)
    ]
    free = [c for c in string.ascii_letters if c not in text]
    covered = "".join(free[: max(ranks)])
    # Like shapes, the axes of ellipses are aligned at their ends.
    terms = [
        term.replace(_ELLIPSIS, covered[len(covered) - rank :])
        for term, rank in zip(written, ranks, strict=True)
    ]
    if any(len(set(term)) < len(term) for term in terms):
        raise UnsupportedOpError(
            node.op_type, node.name,
            f"its equation {text!r} repeats an index in one term; take the diagonal with a"
            " Gather before it",
        )  # fmt: skip
    if arrow:
        result = result.replace(_ELLIPSIS, covered)
    else:
        letters = left.replace(_ELLIPSIS, "").replace(",", "")
        result = covered + "".join(c for c in sorted(letters) if letters.count(c) == 1)
    return _Equation(tuple(terms), result, _extents(terms, shapes))


def _extents(terms: list[str], shapes: list[tuple[int, ...]]) -> dict[str, int]:
    extents: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for letter, extent in zip(term, shape, strict=True):
            extents[letter] = max(extents.get(letter, 1), extent)
    return extents
