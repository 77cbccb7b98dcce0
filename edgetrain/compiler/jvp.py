"""Forward mode: tangents of weights and inputs carried along to every value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import MultiRule, Tangents
from edgetrain.compiler.rules.table import rule_of
from edgetrain.compiler.vjp import passes


def jvp(
    g: GraphBuilder, nodes: Iterable[Node], tangents: Mapping[str, str]
) -> dict[str, str]:
    """Append the tangent graph of `nodes` to `g`.

    Args:
        g: where to emit; it knows type and shape of every primal value.
        nodes: the forward graph in execution order.
        tangents: primal value to the name of its tangent, of the same shape and type.

    Returns:
        `tangents` and the tangents of all values that depend on them, each of its
        primal's shape and type. Values that do not are left out: their tangent is zero.

    Raises:
        UnsupportedOpError: a needed operator has no rule.
        GraphError: a rule needs a constant, such as axes, that is computed at run time.
    """
    known = dict(tangents)
    for node in nodes:
        given = tuple(known.get(x) for x in node.inputs)
        if not any(given) or not passes(g, node):
            continue
        results = _push(g, node, given)
        pairs = zip(node.outputs, results, strict=False)
        known.update({y: ty for y, ty in pairs if ty})
    return known


def _push(g: GraphBuilder, node: Node, tangents: Tangents) -> Tangents:
    rule = rule_of(node)
    if isinstance(rule, MultiRule):
        return rule.jvp(g, node, tangents)
    ty = rule.jvp(g, node, tangents)
    if ty and rule.broadcasts and not _reaches(g, node, tangents):
        ty = g("Expand", ty, g.ints(*g.shape(node.output)))
    return (ty,)


def _reaches(g: GraphBuilder, node: Node, tangents: Tangents) -> bool:
    """Whether some tangent has the output's shape, so that the result has it too."""
    shape = g.shape(node.output)
    pairs = zip(node.inputs, tangents, strict=True)
    return any(tangent and g.shape(x) == shape for x, tangent in pairs)
