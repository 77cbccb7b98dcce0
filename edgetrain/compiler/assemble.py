"""The graphs of one stage, for each gradient mode."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from edgetrain.bundle import Bundle
from edgetrain.compiler.batch_statistics import running_statistics, use_batch_statistics
from edgetrain.compiler.build import GraphBuilder, Node, live_nodes
from edgetrain.compiler.division import Division
from edgetrain.compiler.grids import on_grids, quantisation
from edgetrain.compiler.head import Head, fit
from edgetrain.compiler.layout import placed
from edgetrain.compiler.loss import LABELS, Criterion, attach
from edgetrain.compiler.order import lean_order
from edgetrain.compiler.origin import origins
from edgetrain.compiler.part import Part
from edgetrain.compiler.ports import (
    StageGraphs,
    add_criterion,
    add_seeds,
    make_port,
    merged,
    result_ports,
)
from edgetrain.compiler.program import Program
from edgetrain.compiler.quantise import nodes_to_run
from edgetrain.compiler.rays import crossing_rays
from edgetrain.compiler.rules.blocked import use_blocks
from edgetrain.compiler.stash import Halves, divide
from edgetrain.compiler.values import constants, value_table
from edgetrain.compiler.vjp import prepare, vjp
from edgetrain.manifest import (
    CARRYING,
    DECOUPLED,
    SEGMENTED,
    GraphName,
    Manifest,
    Mode,
    Port,
    Role,
    RunningStatistic,
)
from edgetrain.rays import Rays
from edgetrain.segment import Segment
from edgetrain.tensors import TensorSpec


class Assembler:
    """Compiles the stages of one program.

    Args:
        program: the model.
        trainable: weights the optimizer updates.
        model_sha256: of the user's file.

    Attributes:
        made_of: the weights of each value that depends on nothing but weights.
        constants: the program's other fixed values.
    """

    def __init__(
        self, program: Program, trainable: Collection[str], model_sha256: str
    ) -> None:
        self.program = program
        self.trainable = frozenset(trainable)
        self.model_sha256 = model_sha256
        self._values = value_table(program.model)
        self.constants = constants(program.model)
        nodes = [Node.from_proto(proto) for proto in program.model.graph.node]
        self.made_of = origins(nodes, program.weights, self.constants)

    def assemble(self, part: Part, after: Manifest | None) -> Bundle:
        """Compile one stage.

        Args:
            part: the stage.
            after: the next stage, which says what comes back; None after the last.

        Raises:
            GraphError: the loss does not fit, or a node has no differentiation rule.
        """
        bundle = _Stage(self, part, after, 0).compile()
        if part.block:
            fast = _Stage(self, part, after, part.block).compile()
            if fast.graphs != bundle.graphs:
                return bundle.with_fast(fast, part.block)
        return bundle

    def builder(self, inlined: Iterable[str] = (), block: int = 0) -> GraphBuilder:
        """A builder that knows all primal values.

        Args:
            inlined: the weights that are constants.
            block: of the engine's own layout; 0 for portable graphs.
        """
        weights = {name: np.asarray(self.program.weights[name]) for name in inlined}
        return GraphBuilder(self._values, self.constants | weights, block=block)


class _Stage:
    """One stage in the making."""

    def __init__(
        self, owner: Assembler, part: Part, after: Manifest | None, block: int
    ) -> None:
        self._owner = owner
        self._block = block
        self._part = part
        self._cotangents_in = after.cotangents_out if after else ()
        self._slopes_in = after.rays.slopes_out if after else ()
        self._cotangents_out: tuple[str, ...] = ()
        self._labels: TensorSpec | None = None
        self._segments: tuple[Segment, ...] = ()
        self._rays = Rays()
        weights = [name for name in part.read if name in owner.program.weights]
        trains = part.mode is not Mode.FROZEN
        self._trained = [n for n in weights if trains and n in owner.trainable]
        self._head: Head | None = None
        self._drawn: dict[str, np.ndarray] = {}  # the weights that the model has not
        if part.mode in DECOUPLED and self._trained and not part.target:
            self._head = fit(owner.builder(), part, self._trained)
            self._drawn = self._head.draw(part.seed, part.stage)
        values = {**owner.constants, **owner.program.weights}
        self._quantisation = quantisation(part, values, owner.made_of)
        self._division: Division | None = None
        if part.mode in SEGMENTED:
            whole = owner.builder()
            own = (self._head.end.name,) if self._head else ()
            ends = own or part.ends(self._cotangents_in)
            self._division = Division(whole, part, ends, owner.made_of, self._trained)
            self._trained = self._division.trained
        self._trained = [*self._trained, *self._drawn]
        self._statistics: tuple[RunningStatistic, ...] = ()
        if part.batch_statistics:
            g = owner.builder()
            self._statistics = running_statistics(
                g, part.nodes, owner.program.weights.keys()
            )
        kept = {n for s in self._statistics for n in (s.mean, s.variance)}
        held = {*kept, *self._trained}
        self._held = [n for n in (*weights, *self._drawn) if n in held]
        self._inlined = [n for n in weights if n not in self._held]
        self._graphs = StageGraphs(part, self._held)

    def compile(self) -> Bundle:
        """All the graphs of the stage's mode."""
        if self._division is not None:
            self.add_segmented(self._division)
        elif self._part.target:
            self.add_fused()
        else:
            self.add_split()
        if self._head is not None:
            graph = self._head.add(self._graphs, self._owner.builder(), self._part)
            self._labels = graph.labels
        if self._part.mode in DECOUPLED:
            self._cotangents_out = self._cotangents_in  # what passes it unchanged
        self.add_evaluate()
        return self.bundle()

    def add_fused(self) -> None:
        """`loss`: the last stage's loss, gradients and upstream cotangents in one graph."""
        g, nodes, statistics = self._training_forward()
        criterion = self._attach(g)
        found = self._differentiate(g, nodes, {criterion.target: criterion.cotangent})
        loss = make_port(g, criterion.loss, Role.LOSS)
        results = result_ports(g, found, self._cotangents_out, ())
        outputs = [loss, *statistics, *results]
        live = live_nodes(g.nodes, {port.name for port in outputs})
        self._graphs.add(g, GraphName.LOSS, outputs, lean_order(live, (LABELS,)))

    def add_split(self) -> None:
        """`forward` gives the stash that `backward` takes, if any gradient is wanted."""
        g, nodes, statistics = self._training_forward()
        forward = list(g.nodes)
        seeds = add_seeds(g, self._cotangents_in)
        late: Collection[str] = seeds.values()
        if self._head is not None:
            head, criterion = self._head.attach(g, self._part)
            nodes, seeds = nodes + head, {criterion.target: criterion.cotangent}
            late = (LABELS,)
        found = self._differentiate(g, nodes, seeds)
        results = result_ports(g, found, self._cotangents_out, late)
        wanted = {port.name for port in results}
        halves = Halves(forward, live_nodes(g.nodes[len(forward) :], wanted))
        halves = divide(g, halves, late, self._held, self._part.keep)
        backward = lean_order(live_nodes(halves.backward, wanted), late)
        stash = self._graphs.add(g, GraphName.BACKWARD, results, backward)
        made = merged(self._made_ports(g, self._part.sends, Role.ACTIVATION), statistics)
        self._graphs.add(g, GraphName.FORWARD, merged(made, stash), halves.forward)

    def add_segmented(self, division: Division) -> None:
        """`forward` alone, and the segments' graphs: no backward of the whole stage."""
        g = self._inference_forward()
        forward = self._made_ports(g, self._part.sends, Role.ACTIVATION)
        if self._part.target:
            forward.append(make_port(g, self._part.target, Role.ACTIVATION))
            g_loss = self._owner.builder()
            add_criterion(self._graphs, g_loss, self._attach(g_loss))
        self._graphs.add(g, GraphName.FORWARD, merged(forward), g.nodes)
        builder = self._owner.builder(self._inlined)
        perturbed = division.perturbed(self._graphs)
        self._segments = division.compile(
            self._graphs, builder, perturbed, self._quantisation
        )
        if self._part.mode in CARRYING:
            target = builder.spec(self._part.target) if self._part.target else None
            learns = len(self._trained) > len(division.exact)
            units = [unit for segment in self._segments for unit in segment.units]
            slopes = self._slopes_in
            self._rays = crossing_rays(self._part, slopes, target, units, learns=learns)
            return
        returned = {*self._cotangents_in, division.skip, *perturbed}
        self._cotangents_out = tuple(
            name for name in self._part.wanted_upstream if name in returned
        )

    def add_evaluate(self) -> None:
        """`evaluate`: as deployed; the last stage also gives the loss of each sample."""
        g = self._inference_forward()
        if self._part.target:
            criterion = self._attach(g)
            outputs = self._part.outputs(self._owner.program.outputs)
            ports = self._made_ports(g, outputs, Role.OUTPUT)
            ports.append(make_port(g, criterion.loss, Role.LOSS))
        else:
            ports = self._made_ports(g, self._part.sends, Role.ACTIVATION)
        self._graphs.add(g, GraphName.EVALUATE, ports, g.nodes)

    def bundle(self) -> Bundle:
        program, part = self._owner.program, self._part
        values = {**program.weights, **self._drawn}
        layout, weights = placed(values, self._held, frozenset(self._trained))
        specs, trainable_elements, elements = layout
        manifest = Manifest(
            model_sha256=self._owner.model_sha256,
            stage=part.stage,
            stages=part.stages,
            microbatch=program.batch,
            mode=part.mode,
            receives=part.receives,
            sends=part.sends,
            cotangents_in=self._cotangents_in,
            cotangents_out=self._cotangents_out,
            labels=self._labels,
            outputs=part.outputs(program.outputs),
            loss=part.loss if part.target else "",
            loss_options=part.loss_options,
            weights=on_grids(specs, self._quantisation),
            elements=elements,
            trainable_elements=trainable_elements,
            statistics=self._statistics,
            graphs=self._graphs.specs,
            segments=self._segments,
            skip=self._division.skip if self._division else "",
            estimator=part.estimator,
            rays=self._rays,
            inner=self._division.mode if self._division else None,
        )
        return Bundle(manifest, self._graphs.data, weights)

    def _attach(self, g: GraphBuilder) -> Criterion:
        part = self._part
        criterion = attach(g, part.loss, part.target, part.loss_options)
        self._labels = criterion.labels
        return criterion

    def _differentiate(
        self, g: GraphBuilder, nodes: Sequence[Node], seeds: dict[str, str]
    ) -> dict[str, str]:
        """Cotangents of the trained weights and of what upstream wants one for."""
        wanted = self._part.wanted_upstream
        found = vjp(g, nodes, seeds, [*self._trained, *wanted])
        self._cotangents_out = tuple(name for name in wanted if name in found)
        return found

    def _training_forward(self) -> tuple[GraphBuilder, list[Node], list[Port]]:
        g = self._owner.builder(self._inlined, self._block)
        nodes: list[Node] = list(self._part.nodes)
        statistics: list[Port] = []
        if self._part.batch_statistics:
            nodes, statistics = use_batch_statistics(g, nodes)
        nodes = prepare(g, nodes)
        for node in use_blocks(g, nodes):
            g.append(node)
        return g, nodes, statistics

    def _inference_forward(self) -> GraphBuilder:
        g = self._owner.builder(self._inlined, self._block)
        for node in nodes_to_run(g, self._part.nodes, self._quantisation):
            g.append(node)
        return g

    def _made_ports(
        self, g: GraphBuilder, specs: Iterable[TensorSpec], role: Role
    ) -> list[Port]:
        return [make_port(g, s.name, role) for s in specs if s.name in self._part.made]
