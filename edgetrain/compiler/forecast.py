"""What stretches of a model would stash as stages, before any of them is compiled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from edgetrain.compiler.batch_statistics import use_batch_statistics
from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.program import Program
from edgetrain.compiler.rules.base import saved
from edgetrain.compiler.rules.table import rule_of
from edgetrain.compiler.stash import CHEAP, Keep, Recomputation
from edgetrain.compiler.values import constants, value_table
from edgetrain.compiler.vjp import passes, prepare
from edgetrain.errors import UnsupportedOpError


def stash_forecast(
    program: Program,
    trainable: Collection[str],
    stretches: Iterable[Sequence[Node]],
    keep: Keep = Keep.LEAST,
    *,
    batch_statistics: bool = True,
) -> list[int]:
    """Bytes that each stretch would stash for a microbatch as a stage of its own.

    An upper bound, and so is the sum for a stage of several stretches: it counts all that
    the rules of the nodes say they may read (`OpRule.saves`), leaves out that masks may be
    stashed in place of values, and adds the price of what is computed again. A node
    without a rule counts with all it touches.

    Args:
        program: the model.
        trainable: weights to update; what none of them has an influence on counts nothing.
        stretches: consecutive nodes, together the model.
        keep: as the stages will be compiled.
        batch_statistics: as the stages will be compiled.
    """
    g = GraphBuilder(value_table(program.model), constants(program.model))
    reached = set(trainable)
    sizes = []
    for stretch in stretches:
        nodes = list(stretch)
        if batch_statistics:
            nodes, _ = use_batch_statistics(g, nodes)
        nodes = prepare(g, nodes)
        needed = set(_saved(g, nodes, reached)).difference(program.weights)
        sizes.append(_bytes(g, nodes, needed, program.weights, keep))
    return sizes


def _saved(g: GraphBuilder, nodes: Iterable[Node], reached: set[str]) -> Iterator[str]:
    """The values that the VJPs may read; `reached` grows by what the nodes make."""
    for node in nodes:
        if reached.isdisjoint(node.inputs) or not passes(g, node):
            continue
        reached.update(filter(None, node.outputs))
        try:
            names: Iterable[str] = saved(rule_of(node), node)
        except UnsupportedOpError:
            names = filter(None, (*node.inputs, *node.outputs))
        yield from (name for name in names if not g.is_constant(name))


def _bytes(
    g: GraphBuilder,
    nodes: Iterable[Node],
    needed: Collection[str],
    weights: Collection[str],
    keep: Keep,
) -> int:
    again = Recomputation(g, weights)
    again.add_forward(nodes, CHEAP if keep is Keep.LEAST else None)
    if keep is Keep.LEAST:
        return again.cheapest(needed)[1]
    kept = needed if keep is Keep.ALL else again.origins(needed)
    return sum(g.spec(name).nbytes for name in kept)
