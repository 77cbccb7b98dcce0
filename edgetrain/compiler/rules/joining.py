"""Sums of pieces that lie side by side, such as the parts of a Split or of Gathers."""

from __future__ import annotations

from collections.abc import Sequence

from edgetrain.compiler.build import GraphBuilder, Node

Span = tuple[int, int, int]  # axis, zeros before, zeros after


def joined(g: GraphBuilder, terms: Sequence[str], shape: Sequence[int]) -> str | None:
    """The sum of values that Pad made of pieces which tile an axis, as one Concat.

    Adding padded pieces would read and write the whole once a piece.

    Args:
        g: where the terms were emitted.
        terms: what is to be added.
        shape: of each term.

    Returns:
        The joined value; None where the terms are something else.
    """
    spans: list[tuple[Span, str]] = []
    for term in terms:
        node = g.maker(term)
        span = None if node is None else _span(g, node, len(shape))
        if node is None or span is None:
            return None
        spans.append((span, node.inputs[0]))
    spans.sort()
    reached, axis = 0, spans[0][0][0]
    for (own_axis, before, after), _ in spans:
        if own_axis != axis or before != reached:
            return None
        reached = shape[axis] - after
    if reached != shape[axis]:
        return None
    return g("Concat", *(piece for _, piece in spans), axis=axis)


def _span(g: GraphBuilder, node: Node, rank: int) -> Span | None:
    """The axis a node pads with zeros, if it is one alone."""
    if node.op_type != "Pad" or node.input(2) or "mode" in node.attributes:
        return None
    if not all(g.is_constant(name) for name in node.inputs[1:] if name):
        return None
    pads = g.value(node.inputs[1]).tolist()
    axes = g.value(node.input(3)).tolist() if node.input(3) else [*range(rank)]
    half = len(pads) // 2
    padded = [
        (axis % rank, before, after)
        for axis, before, after in zip(axes, pads[:half], pads[half:], strict=True)
        if before or after
    ]
    return padded[0] if len(padded) == 1 and min(padded[0]) >= 0 else None
