"""Reverse mode: from cotangents of outputs to cotangents of weights and inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, MultiRule, add_all
from edgetrain.compiler.rules.joining import joined
from edgetrain.compiler.rules.normalization import layer_norm_axis
from edgetrain.compiler.rules.recurrent import with_hidden_states
from edgetrain.compiler.rules.shaping import sum_to
from edgetrain.compiler.rules.table import CONSTANT, rule_of
from edgetrain.errors import UnsupportedOpError


def vjp(
    g: GraphBuilder,
    nodes: Sequence[Node],
    seeds: Mapping[str, str],
    wrt: Collection[str],
) -> dict[str, str]:
    """Append the backward graph of `nodes` to `g`.

    Args:
        g: where to emit; it knows type and shape of every primal value.
        nodes: the forward graph in execution order.
        seeds: primal value to the name of its cotangent, of the same shape and type.
        wrt: the primal values whose cotangents are wanted: weights, inputs or values in
            between. A value that is also seeded counts its seed.

    Returns:
        For each value of `wrt` that the seeds depend on, the name of its cotangent, of
        the value's own shape and type. Values without a path to a seed are left out.

    Raises:
        UnsupportedOpError: an operator on a path from `wrt` to a seed has no rule.
        GraphError: a rule needs a constant, such as axes, that is computed at run time.
    """
    active = _active(g, nodes, wrt)
    terms: defaultdict[str, list[str]] = defaultdict(list)
    for value, seed in seeds.items():
        terms[value].append(seed)
    for node in reversed(nodes):
        if not passes(g, node) or active.isdisjoint(node.inputs):
            continue
        dys = tuple(_total(g, terms, y) for y in node.outputs)
        if not any(dys):
            continue
        for x, dx in zip(node.inputs, _pull(g, node, dys), strict=False):
            if dx and x in active:
                terms[x].append(dx)
    totals = {value: _total(g, terms, value) for value in wrt}
    return {value: total for value, total in totals.items() if total}


def prepare(g: GraphBuilder, nodes: Iterable[Node]) -> list[Node]:
    """Rewrite forward nodes so that they yield what their VJPs want to read.

    They declare outputs that their kernels compute anyhow: a LayerNormalization its mean
    and reciprocal deviation, a recurrent node the hidden states of all steps.

    Args:
        g: learns the shapes of the added values.
        nodes: the forward graph.

    Returns:
        The graph to run and to differentiate; every old value keeps its name.
    """
    return [_PREPARED[n.op_type](g, n) if n.op_type in _PREPARED else n for n in nodes]


def _with_statistics(g: GraphBuilder, node: Node) -> Node:
    x = node.inputs[0]
    axis, shape = layer_norm_axis(g, node), g.shape(x)
    rows = (*shape[:axis], *(1 for _ in shape[axis:]))
    defaults = (node.output, f"{node.output}/mean", f"{node.output}/inv_std")
    given = (*node.outputs, "", "")
    outputs = tuple(own or new for own, new in zip(given, defaults, strict=False))
    for name in outputs[1:]:
        g.describe(name, g.dtype(x), rows)
    return replace(node, outputs=outputs)


_PREPARED: Final[Mapping[str, Callable[[GraphBuilder, Node], Node]]] = {
    "GRU": with_hidden_states,
    "LSTM": with_hidden_states,
    "LayerNormalization": _with_statistics,
    "RNN": with_hidden_states,
}


def passes(g: GraphBuilder, node: Node) -> bool:
    """Whether derivatives pass through a node at all."""
    return node.op_type not in CONSTANT and any(map(g.is_float, node.outputs))


def _active(g: GraphBuilder, nodes: Iterable[Node], wrt: Collection[str]) -> set[str]:
    """The values that depend differentiably on one of `wrt`."""
    active = set(wrt)
    for node in nodes:
        if passes(g, node) and not active.isdisjoint(node.inputs):
            active.update(filter(g.is_float, node.outputs))
    return active


def _total(g: GraphBuilder, terms: dict[str, list[str]], value: str) -> str | None:
    """The sum of a value's cotangents so far, emitted once."""
    parts = terms.get(value, [])
    total = joined(g, parts, g.shape(value)) if len(parts) > 1 else None
    total = total or add_all(g, *parts)
    if total:
        terms[value] = [total]
    return total


def _pull(g: GraphBuilder, node: Node, dys: Cotangents) -> Cotangents:
    """Apply a node's rule, undoing its broadcasting."""
    rule = rule_of(node)
    if isinstance(rule, MultiRule):
        return rule.vjp(g, node, dys)
    dy, *others = dys
    if dy is None or any(others):
        raise UnsupportedOpError(
            node.op_type, node.name, "only its first output can be differentiated"
        )
    dxs = rule.vjp(g, node, dy)
    if not rule.broadcasts:
        return dxs
    shape = g.shape(node.output)
    pairs = zip(node.inputs, dxs, strict=False)
    return tuple(dx and sum_to(g, dx, shape, g.shape(x)) for x, dx in pairs)
