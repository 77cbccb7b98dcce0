"""Where a model can be cut into stages, and what crosses each cut."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edgetrain.compiler.build import Node
from edgetrain.compiler.cost import node_flop
from edgetrain.compiler.origin import origins, prepares, weights_of
from edgetrain.compiler.program import Program
from edgetrain.compiler.trainable import LINEAR_OPS
from edgetrain.compiler.values import value_table
from edgetrain.errors import PlanError
from edgetrain.tensors import TensorSpec

ANCHORS: Final = LINEAR_OPS | {"Gather", "Einsum"}
OFFERED: Final = 8  # cuts that a message names


@dataclass(frozen=True, slots=True)
class Cut:
    """A place between two nodes.

    Attributes:
        position: the number of nodes before it.
        crossing: the values that go from before it to after it, in order of production.
    """

    position: int
    crossing: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.crossing)

    @property
    def name(self) -> str:
        return "+".join(spec.name for spec in self.crossing)


@dataclass(frozen=True, slots=True)
class Layer:
    """What lies between two neighbouring valid cuts: the planner's unit.

    Attributes:
        start, stop: its nodes, as a range of the program's.
        flop: of one forward of a microbatch.
        weight_elements: of all its weights.
        output: the cut at its end.
    """

    start: int
    stop: int
    flop: int
    weight_elements: int
    output: Cut


class CutFinder:
    """Finds the cuts of one program.

    Args:
        program: the model.
        trainable: weights whose users must stay in one stage, as their gradients add up.
    """

    def __init__(self, program: Program, trainable: Collection[str]) -> None:
        self._values = value_table(program.model)
        self._program = program
        nodes = [Node.from_proto(proto) for proto in program.model.graph.node]
        constants = {tensor.name for tensor in program.model.graph.initializer}
        self._made_of = origins(nodes, program.weights, constants)
        self.nodes = _just_in_time(nodes, self._made_of)
        self._made = {spec.name: 0 for spec in program.inputs}
        self._last: dict[str, int] = {}
        users: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            self._made |= {name: index + 1 for name in node.outputs if name}
            self._last |= dict.fromkeys(node.inputs, index + 1)
            for weight in weights_of(node, self._made_of):
                users.setdefault(weight, []).append(index)
        self._last |= {spec.name: len(self.nodes) + 1 for spec in program.outputs}
        self._tied = [
            (min(indices) + 1, max(indices))
            for weight, indices in users.items()
            if weight in trainable and len(indices) > 1
        ]

    def at(self, position: int) -> Cut:
        """The cut before node number `position`."""
        crossing = [
            self._values[name]
            for name, made in self._made.items()
            if made <= position < self._last.get(name, 0)
        ]
        return Cut(position, tuple(crossing))

    def splits_tie(self, position: int) -> bool:
        """Whether a trainable weight is used on both sides."""
        return any(first <= position <= last for first, last in self._tied)

    def valid(self) -> tuple[Cut, ...]:
        """The cheapest cut between each two neighbouring linear nodes that have weights.

        Of the places between them the one that fewest bytes cross is taken, the latest
        where several are equal: activations and pooling stay with the layer they follow.
        """
        weighted = [
            index
            for index, node in enumerate(self.nodes)
            if node.op_type in ANCHORS
            and weights_of(node, self._made_of)
            and not prepares(node, self._made_of)
        ]
        cuts: list[Cut] = []
        for before, after in itertools.pairwise(weighted):
            places = [self.at(p) for p in range(before + 1, after + 1)]
            places = [cut for cut in places if not self.splits_tie(cut.position)]
            if places:
                best = min(places, key=lambda cut: (cut.nbytes, -cut.position))
                if best.crossing and best.crossing != (cuts[-1].crossing if cuts else ()):
                    cuts.append(best)
        return tuple(cuts)

    def named(self, name: str) -> Cut:
        """The cut right after the node that makes a tensor.

        Raises:
            PlanError: no such tensor, or a trainable weight is used on both sides.
        """
        if name not in self._made or not 0 < self._made[name] < len(self.nodes):
            offered = ", ".join(cut.name for cut in self.valid()[:OFFERED]) or "none"
            raise PlanError(
                f"[plan] cuts: {name!r} is not a tensor the model can be cut at."
                f" Valid cuts begin with: {offered} (see `edgetrain inspect`)"
            )
        position = self._made[name]
        if self.splits_tie(position):
            raise PlanError(
                f"[plan] cuts: a trainable weight is used both before and after {name!r};"
                " cut elsewhere, or leave that weight out of [model] trainable"
            )
        return self.at(position)

    def layers(self) -> tuple[Layer, ...]:
        """The stretches between valid cuts, the planner's units."""
        end = Cut(len(self.nodes), self._program.outputs)
        return self.between((*self.valid(), end))

    def between(self, cuts: Sequence[Cut]) -> tuple[Layer, ...]:
        """One layer before each of the cuts, which are in ascending order."""
        layers = []
        start = 0
        for cut in cuts:
            nodes = self.nodes[start : cut.position]
            names = {name for node in nodes for name in node.inputs}
            weights = [
                self._program.weights[n] for n in names if n in self._program.weights
            ]
            layers.append(
                Layer(
                    start,
                    cut.position,
                    sum(node_flop(node, self._values) for node in nodes),
                    sum(weight.size for weight in weights),
                    cut,
                )
            )
            start = cut.position
        return tuple(layers)


def _just_in_time(
    nodes: Sequence[Node], made_of: Mapping[str, frozenset[str]]
) -> tuple[Node, ...]:
    """Move nodes that only prepare a weight to right before their first user.

    Exporters write a weight's Transpose anywhere; what it makes would cross every cut
    between there and its use, and part the weight from the stage that trains it.
    """
    makers = {
        name: index
        for index, node in enumerate(nodes)
        if prepares(node, made_of)
        for name in node.outputs
        if name
    }
    preparing = set(makers.values())
    placed: dict[int, None] = {}
    for index in range(len(nodes)):
        if index in preparing:
            continue
        pending, wanted = [index], {index}
        while pending:  # not by recursion: a chain may be longer than Python's stack
            sources = {makers[n] for n in nodes[pending.pop()].inputs if n in makers}
            fresh = sources - wanted - placed.keys()
            wanted |= fresh
            pending.extend(fresh)
        placed |= dict.fromkeys(sorted(wanted))
    placed |= dict.fromkeys(sorted(preparing - placed.keys()))
    return tuple(nodes[index] for index in placed)
