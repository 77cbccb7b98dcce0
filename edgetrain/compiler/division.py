"""How a stage without a backward graph is divided, and what learns in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgetrain.compiler.build import GraphBuilder
from edgetrain.compiler.grids import Quantisation
from edgetrain.compiler.identity import Residual, residual
from edgetrain.compiler.part import Part
from edgetrain.compiler.ports import StageGraphs
from edgetrain.compiler.quantise import quantise
from edgetrain.compiler.segment_graphs import SegmentGraphs, Source
from edgetrain.compiler.segments import layers_of, stretches
from edgetrain.compiler.trainable import LINEAR_OPS, tail_weights
from edgetrain.estimator_spec import ACTIVATIONS
from edgetrain.manifest import CARRYING, GraphName, Mode
from edgetrain.segment import Segment


class Division:
    """The segments of one stage.

    Attributes:
        mode: how the cotangent of the stage's end spreads: ``hybrid`` or ``identity``.
        trained: the weights that learn; with `identity`, fewer than were asked for.
        skip: the received value whose cotangent is that of the stage's end.
        exact: those of the weights whose gradient is, where others' are estimated.

    Args:
        g: knows all primal values, the program's constants among them.
        part: the stage.
        ends: the values whose cotangent it gets.
        made_of: the weights of each value that depends on nothing else.
        trained: the weights that were asked for.
    """

    def __init__(
        self,
        g: GraphBuilder,
        part: Part,
        ends: Sequence[str],
        made_of: Mapping[str, frozenset[str]],
        trained: Sequence[str],
    ) -> None:
        self._part = part
        self._ends = tuple(ends)
        wanted = frozenset(trained)
        self._made_of = {name: whose & wanted for name, whose in made_of.items()}
        read = {name for node in part.nodes for name in node.reads}
        fixed = made_of.keys() | {name for name in read if g.is_constant(name)}
        self._fixed = frozenset(fixed)
        self._layers = layers_of(part.nodes, self._made_of, self._fixed)
        self.trained, self.skip = list(trained), ""
        found = Residual((), "")
        if len(self._ends) == 1:
            found = residual(g, part.nodes, self._layers, self._ends[0])
        self.mode = part.mode
        if part.mode is Mode.LOCAL:
            self.mode = Mode.IDENTITY if self._is_stream(found) else Mode.HYBRID
        if self.mode is Mode.IDENTITY:
            self._layers = found.layers[::-1]
            learning = {w for layer in found.layers for w in layer.weights}
            self.trained = [name for name in trained if name in learning]
            self.skip = found.source if found.source in part.wanted_upstream else ""
        self.exact = self._tail()

    def _is_stream(self, found: Residual) -> bool:
        """Whether the stage is residual but for a layer that makes the stream."""
        makers = (i for i, n in enumerate(self._part.nodes) if found.begin in n.outputs)
        begin = next(makers, -1)
        return bool(found.layers) and sum(x.stop <= begin + 1 for x in self._layers) <= 1

    def perturbed(self, graphs: StageGraphs) -> tuple[str, ...]:
        """The received values that get noise, or that noise upstream has moved."""
        part = self._part
        if part.mode in CARRYING:
            return part.wanted_upstream
        if self.mode is Mode.IDENTITY or not part.estimator.upstream:
            return ()
        wanted = part.wanted_upstream
        return tuple(name for name in wanted if graphs.reads(GraphName.FORWARD, name))

    def compile(
        self,
        graphs: StageGraphs,
        builder: GraphBuilder,
        perturbed: Sequence[str],
        quantisation: Quantisation | None = None,
    ) -> tuple[Segment, ...]:
        """Compile the segments.

        Args:
            graphs: takes their graphs.
            builder: knows all primal values; weights that do not train are constants.
            perturbed: the received values that get noise.
            quantisation: of the forward; what is exact sees the values that it gives.
        """
        part, layers, tail = self._part, self._layers, self.exact
        nodes, estimates = part.nodes, self.mode is not Mode.IDENTITY
        pushes = estimates and part.estimator.noise == ACTIVATIONS
        if quantisation is not None:
            nodes = tuple(quantise(builder, nodes, quantisation, keep=tail))
            layers = layers_of(nodes, self._made_of, self._fixed)
        if estimates and not pushes:
            layers = tuple(x for x in layers if not x.weights.isdisjoint(tail))
        source = Source(
            builder,
            nodes,
            self._ends,
            tuple(perturbed),
            part.first,
            cones=part.mode not in CARRYING,
        )
        segments = SegmentGraphs(
            graphs, source, part.estimator, pushes=pushes and bool(self._ends)
        )
        return segments.compile(stretches(len(nodes), layers, tail), tail)

    def _tail(self) -> list[str]:
        """Trained weights of the stage's last linear op and of what follows it.

        Where noise is carried on to the loss, only the last stage has a cotangent there.
        """
        part = self._part
        if part.mode is Mode.IDENTITY or (part.mode in CARRYING and not part.target):
            return []
        nodes = [n for x in self._layers for n in self._part.nodes[x.start : x.stop]]
        if not self._ends or not any(node.op_type in LINEAR_OPS for node in nodes):
            return []
        last = tail_weights(self._part.nodes, self._made_of, 1)
        return [name for name in self.trained if name in last]
