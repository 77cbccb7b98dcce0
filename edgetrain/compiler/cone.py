"""Where a change of one value is felt in another: receptive fields, seen from below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.sizes import conv_sizes
from edgetrain.compiler.rules.window import Window, window
from edgetrain.compiler.segments import ACTIVATIONS

Span = tuple[int, int]
# A place of a value -> the first and last place of the source it depends on; None: on any.
Field = tuple[Span, ...] | None
Cone = tuple[tuple[Span, ...], ...]

_PLACE_BY_PLACE: Final = ACTIVATIONS | {
    "Add", "Sub", "Mul", "Div", "Sum", "Identity", "BatchNormalization", "Dropout", "Cast",
    "Where", "Min", "Max", "Pow", "Sqrt", "Exp", "Erf", "Neg", "Abs",
}  # fmt: skip
_POOLS: Final = frozenset({"MaxPool", "AveragePool"})
_DENSE: Final = frozenset({"MatMul", "Gemm"})


def cone(g: GraphBuilder, nodes: Iterable[Node], source: str, result: str) -> Cone:
    """At which places of `result` each place of `source` is felt, an axis at a time.

    Args:
        g: knows the shapes.
        nodes: in execution order, all that lie between the two.
        source: a value [N, ...].
        result: another one that depends on it.

    Returns:
        For each axis but the first, a (first, last) for each place of `source`; an axis
        along which it is felt everywhere is empty. Nothing at all where no axis is local,
        or the two have different ranks. Spans may be wider than need be, never narrower.

    A place that is felt nowhere gets a last place before its first.
    """
    shape, rank = g.shape(source), g.rank(source)
    if g.rank(result) != rank:
        return ()
    start = tuple(tuple((p, p) for p in range(n)) for n in shape[1:])
    fields: dict[str, tuple[Field, ...]] = {source: start}
    for node in nodes:
        known = [name for name in node.inputs if name in fields]
        if known and node.outputs:
            fields[node.output] = _through(g, node, known, fields)
    found = fields.get(result, ())
    if all(field is None for field in found):
        return ()
    return tuple(
        () if field is None else _inverted(field, n)
        for field, n in zip(found, shape[1:], strict=True)
    )


def _through(
    g: GraphBuilder,
    node: Node,
    known: Sequence[str],
    fields: dict[str, tuple[Field, ...]],
) -> tuple[Field, ...]:
    """The fields of a node's output, one for each axis but the first."""
    x, y = known[0], node.output
    before = fields[x]
    everywhere: tuple[Field, ...] = (None,) * max(0, g.rank(y) - 1)
    if g.rank(x) != g.rank(y) or len(before) != g.rank(y) - 1:
        return everywhere
    if node.op_type in _PLACE_BY_PLACE and all(g.shape(n) == g.shape(y) for n in known):
        axes = zip(*(fields[name] for name in known), strict=True)
        return tuple(_union(axis) for axis in axes)
    if node.op_type == "Conv" and known == [node.inputs[0]]:
        c = conv_sizes(g, node)
        channels = before[0] if c.depthwise else None
        return (channels, *_slid(before[1:], c.window))
    if node.op_type in _POOLS:
        kernel = node.attributes["kernel_shape"]
        view = window(node, g.shape(x)[2:], g.shape(y)[2:], kernel)
        return (before[0], *_slid(before[1:], view))
    if node.op_type in _DENSE and known == [node.inputs[0]]:
        return (*before[:-1], None)
    if node.op_type in ("LayerNormalization", "Softmax", "LogSoftmax"):
        first = node.get("axis", -1) % g.rank(x)
        if first > 0:
            return (*before[: first - 1], *everywhere[first - 1 :])
    return everywhere


def _slid(fields: Sequence[Field], view: Window) -> list[Field]:
    """What each step of a window sees of the source."""
    found: list[Field] = []
    for axis, field in enumerate(fields):
        if field is None:
            found.append(None)
            continue
        reach, spans = view.reach[axis], []
        for step in range(view.steps[axis]):
            start = step * view.strides[axis] - view.begin[axis]
            seen = field[max(0, start) : max(0, start + reach + 1)]
            spans.append(_hull(seen))
        found.append(tuple(spans))
    return found


def _hull(spans: Sequence[Span]) -> Span:
    real = [span for span in spans if span[0] <= span[1]]
    if not real:
        return (0, -1)
    return min(first for first, _ in real), max(last for _, last in real)


def _union(fields: Sequence[Field]) -> Field:
    if any(field is None for field in fields):
        return None
    return tuple(_hull(spans) for spans in zip(*(f for f in fields if f), strict=True))


def _inverted(field: tuple[Span, ...], places: int) -> tuple[Span, ...]:
    """For each place of the source, the first and the last that depends on it."""
    spans = [[len(field), -1] for _ in range(places)]
    for step, (first, last) in enumerate(field):
        for place in range(first, last + 1):
            spans[place][0] = min(spans[place][0], step)
            spans[place][1] = max(spans[place][1], step)
    return tuple((first, last) for first, last in spans)
