"""Where a stage is divided into stretches that are run one at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edgetrain.compiler.build import Node
from edgetrain.compiler.origin import prepares, weights_of

# They follow a linear layer, belong to it, and leave every position where it is.
AFFINE: Final = frozenset({"Add", "Sub", "Mul", "Div", "BatchNormalization"})
ACTIVATIONS: Final = frozenset(
    {
        "Relu", "Clip", "LeakyRelu", "Elu", "Selu", "Celu", "Sigmoid", "Tanh", "Gelu",
        "HardSigmoid", "HardSwish", "Softplus", "Softsign", "Mish", "ThresholdedRelu",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear op with weights that train, and what belongs to it.

    Attributes:
        start, stop: its nodes lie in this range of the stage's, perhaps among others.
        name: the value it makes, bias and normalisation included.
        weights: those that train.
        activation: the node right after it, where that is element-wise and alone.
    """

    start: int
    stop: int
    name: str
    weights: frozenset[str]
    activation: Node | None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of the stage's nodes and the layers in it."""

    start: int
    stop: int
    layers: tuple[Layer, ...]


def layers_of(
    nodes: Sequence[Node],
    made_of: Mapping[str, frozenset[str]],
    fixed: frozenset[str],
) -> tuple[Layer, ...]:
    """The layers with trained weights of a stretch of nodes, in order.

    Args:
        nodes: in execution order.
        made_of: the trained weights of each value that depends on weights alone.
        fixed: values that depend on no data: weights, constants, and what is made of them.
    """
    users: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in node.reads:
            users.setdefault(name, []).append(index)
    found: list[Layer] = []
    taken: set[int] = set()
    for index, node in enumerate(nodes):
        if index in taken or prepares(node, made_of) or not weights_of(node, made_of):
            continue
        places = [index]
        while (follower := _follower(nodes, users, places[-1])) is not None:
            beside = set(nodes[follower].inputs) - {"", *nodes[places[-1]].outputs}
            if nodes[follower].op_type not in AFFINE or not beside <= fixed:
                break
            places.append(follower)
        taken.update(places)
        found.append(_layer(nodes, users, places, made_of))
    return tuple(found)


def _follower(
    nodes: Sequence[Node], users: Mapping[str, Sequence[int]], index: int
) -> int | None:
    """The only node that reads what a node makes."""
    after = {user for name in nodes[index].outputs for user in users.get(name, ())}
    return after.pop() if len(after) == 1 else None


def _layer(
    nodes: Sequence[Node],
    users: Mapping[str, Sequence[int]],
    places: Sequence[int],
    made_of: Mapping[str, frozenset[str]],
) -> Layer:
    start, last = places[0], places[-1]
    while start and prepares(nodes[start - 1], made_of):
        start -= 1
    follower = _follower(nodes, users, last)
    activation = None
    if follower is not None and nodes[follower].op_type in ACTIVATIONS:
        activation, last = nodes[follower], follower
    weights = frozenset[str]().union(*(weights_of(nodes[i], made_of) for i in places))
    return Layer(start, last + 1, nodes[places[-1]].output, weights, activation)


def stretches(
    count: int, layers: Sequence[Layer], tail: Collection[str]
) -> tuple[Stretch, ...]:
    """Divide `count` nodes after each layer; what is before one goes with it.

    Layers that overlap, or that share a weight, come into one stretch, as do all from the
    first on that has one of the `tail` weights.
    """
    found: list[Stretch] = []
    for layer in layers:
        start = found[-1].stop if found else 0
        joined = Stretch(start, layer.stop, (layer,))
        first = next((i for i, s in enumerate(found) if _belongs(s, layer, tail)), None)
        for stretch in reversed(found[first:] if first is not None else ()):
            stop = max(stretch.stop, joined.stop)
            joined = Stretch(stretch.start, stop, stretch.layers + joined.layers)
        found = [*found[:first], joined] if first is not None else [*found, joined]
    if not found:
        return (Stretch(0, count, ()),)
    last = found[-1]
    if any(not layer.weights.isdisjoint(tail) for layer in last.layers):
        return (*found[:-1], Stretch(last.start, count, last.layers))
    rest = Stretch(last.stop, count, ())
    return (*found, rest) if last.stop < count else tuple(found)


def _belongs(stretch: Stretch, layer: Layer, tail: Collection[str]) -> bool:
    shared = any(not layer.weights.isdisjoint(x.weights) for x in stretch.layers)
    exact = any(not x.weights.isdisjoint(tail) for x in stretch.layers)
    return layer.start < stretch.stop or shared or exact
