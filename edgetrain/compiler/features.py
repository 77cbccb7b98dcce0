"""What the planner's layers do, by op group: from shapes, before any device is known."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from edgetrain.compiler.build import Node
from edgetrain.compiler.cost import node_amount, op_group
from edgetrain.compiler.cut import Layer
from edgetrain.compiler.program import Program
from edgetrain.compiler.values import value_table
from edgetrain.op_groups import NONE, Amount, LayerFeatures, OpGroup
from edgetrain.tensors import TensorSpec

PRODUCTS: Final = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})


def layer_features(
    program: Program,
    trainable: Collection[str],
    nodes: Sequence[Node],
    layers: Iterable[Layer],
) -> tuple[LayerFeatures, ...]:
    """The features of each layer of a program, for one microbatch.

    Args:
        program: the model.
        trainable: weights that train: no cotangent goes back past the first of them.
        nodes: the program's, in the order that the layers count in: `CutFinder.nodes`.
        layers: `CutFinder.layers` or `CutFinder.between`.
    """
    values = value_table(program.model)
    shares = _backward_shares(nodes, frozenset(trainable))
    return tuple(
        _features(
            nodes[layer.start : layer.stop],
            shares[layer.start : layer.stop],
            values,
            frozenset(trainable),
        )
        for layer in layers
    )


def _features(
    nodes: Sequence[Node],
    shares: Sequence[float],
    values: Mapping[str, TensorSpec],
    trainable: frozenset[str],
) -> LayerFeatures:
    forward: dict[OpGroup, Amount] = {}
    backward: dict[OpGroup, Amount] = {}
    for node, share in zip(nodes, shares, strict=True):
        group, amount = op_group(node, values), node_amount(node, values)
        forward[group] = forward.get(group, NONE) + amount
        if share:
            backward[group] = backward.get(group, NONE) + amount.times(share)
    own = {name for node in nodes for name in node.inputs if name in trainable}
    return LayerFeatures(forward, backward, sum(values[name].elements for name in own))


def _backward_shares(nodes: Sequence[Node], trainable: frozenset[str]) -> list[float]:
    """Of each node, how much of its whole backward runs.

    A product has two to do, one for its weights and one for its input; both count half.
    Any other node runs its backward or does not.
    """
    reached = set(trainable)
    shares = []
    for node in nodes:
        wanted = [name in reached for name in node.inputs if name]
        if any(wanted):
            reached.update(name for name in node.outputs if name)
        halves = node.op_type in PRODUCTS
        shares.append(sum(wanted[:2]) / 2 if halves else float(any(wanted)))
    return shares
