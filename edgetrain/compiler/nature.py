"""What a stretch of a model is like, before it becomes a stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.cut import Cut, CutFinder
from edgetrain.compiler.identity import residual
from edgetrain.compiler.origin import origins, weights_of
from edgetrain.compiler.program import Program
from edgetrain.compiler.segments import layers_of
from edgetrain.compiler.values import constants, value_table

_CONVOLUTIONS: Final = frozenset({"Conv", "ConvTranspose"})


@dataclass(frozen=True, slots=True)
class Nature:
    """One stretch.

    Attributes:
        trains: elements of the weights that are to train.
        branches: it is residual, and layers that end its branches are among them.
        streams: its residual stream begins before it.
        convolutional: it convolves with weights.
    """

    trains: int
    branches: bool
    streams: bool
    convolutional: bool


def natures(
    program: Program, cuts: Sequence[Cut], trainable: Collection[str]
) -> Iterator[Nature]:
    """Look at each stretch between cuts.

    Args:
        program: the model.
        cuts: ascending; one fewer than there are stretches.
        trainable: the weights that are to train.
    """
    finder = CutFinder(program, trainable)
    fixed = constants(program.model)
    g = GraphBuilder(value_table(program.model), fixed)
    made_of = origins(finder.nodes, program.weights, fixed)
    trained = {name: whose & frozenset(trainable) for name, whose in made_of.items()}
    positions = [0, *(cut.position for cut in cuts), len(finder.nodes)]
    for stage, stop in enumerate(positions[1:]):
        nodes = finder.nodes[positions[stage] : stop]
        read = {name for node in nodes for name in node.reads}
        layers = layers_of(nodes, trained, frozenset(made_of.keys() | fixed.keys()))
        crossing = cuts[stage].crossing if stage < len(cuts) else ()
        found, streams = False, False
        if len(crossing) == 1:
            stream = residual(g, nodes, layers, crossing[0].name)
            found, streams = bool(stream.layers), bool(stream.source)
        names = read & set(trainable)
        sizes = (program.weights[name].size for name in names)
        convolutional = any(_convolves(node, made_of) for node in nodes)
        yield Nature(sum(sizes), found, streams, convolutional)


def _convolves(node: Node, made_of: Mapping[str, frozenset[str]]) -> bool:
    return node.op_type in _CONVOLUTIONS and bool(weights_of(node, made_of))
