"""Which weights a value is made of, where it depends on nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from edgetrain.compiler.build import Node


def origins(
    nodes: Iterable[Node], weights: Collection[str], constants: Collection[str]
) -> Mapping[str, frozenset[str]]:
    """The weights themselves, and every value computed from weights and constants alone.

    Exporters write a dense layer as a product with the weight's Transpose: whoever asks
    what a node's weights are means that weight.

    Args:
        nodes: in execution order.
        weights: names of the model's weights.
        constants: names of its other fixed values.

    Returns:
        For each such value the weights it comes from.
    """
    found = {name: frozenset((name,)) for name in weights}
    for node in nodes:
        varying = {name for name in node.inputs if name and name not in constants}
        if varying and varying <= found.keys():
            made_of = frozenset[str]().union(*(found[name] for name in varying))
            found.update({name: made_of for name in node.outputs if name})
    return found


def weights_of(node: Node, made_of: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The weights a node reads, prepared ones included."""
    return frozenset[str]().union(*(made_of.get(name, ()) for name in node.inputs))


def prepares(node: Node, made_of: Mapping[str, frozenset[str]]) -> bool:
    """Whether a node only prepares weights for others."""
    return all(name in made_of for name in node.outputs if name)
