"""The graphs of one stage, for each gradient mode."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from edgetrain.bundle import (
    Bundle,
    GraphName,
    GraphSpec,
    Manifest,
    Mode,
    Port,
    Role,
    RunningStatistic,
    lay_out,
    sha256,
    view,
)
from edgetrain.compiler.batch_statistics import running_statistics, use_batch_statistics
from edgetrain.compiler.build import (
    GraphBuilder,
    Node,
    constants,
    live_nodes,
    value_table,
)
from edgetrain.compiler.loss import LABELS, attach
from edgetrain.compiler.part import Part
from edgetrain.compiler.program import Program
from edgetrain.compiler.trainable import LINEAR_OPS
from edgetrain.compiler.vjp import prepare, vjp
from edgetrain.tensors import TensorSpec

COTANGENT: Final = "cotangent/"


class Assembler:
    """Compiles the stages of one program.

    Args:
        program: the model.
        trainable: weights the optimizer updates.
        model_sha256: of the user's file.
    """

    def __init__(
        self, program: Program, trainable: Collection[str], model_sha256: str
    ) -> None:
        self.program = program
        self.trainable = frozenset(trainable)
        self.model_sha256 = model_sha256
        self._values = value_table(program.model)
        self._constants = constants(program.model)

    def assemble(self, part: Part, cotangents_in: Sequence[str]) -> Bundle:
        """Compile one stage.

        Args:
            part: the stage.
            cotangents_in: names in `part.sends` whose cotangent comes from downstream.

        Raises:
            GraphError: the loss does not fit, or a node has no differentiation rule.
        """
        stage = _Stage(self, part, tuple(cotangents_in))
        if part.mode is Mode.HYBRID:
            stage.add_perturbed()
        elif part.target:
            stage.add_fused()
        else:
            stage.add_split()
        stage.add_evaluate()
        return stage.bundle()

    def builder(self, inlined: Iterable[str] = ()) -> GraphBuilder:
        """A builder that knows all primal values; the weights `inlined` are constants."""
        weights = {name: np.asarray(self.program.weights[name]) for name in inlined}
        return GraphBuilder(self._values, self._constants | weights)


class _Stage:
    """One stage in the making."""

    def __init__(
        self, owner: Assembler, part: Part, cotangents_in: tuple[str, ...]
    ) -> None:
        self._owner = owner
        self._part = part
        self._cotangents_in = cotangents_in
        self._cotangents_out: tuple[str, ...] = ()
        self._labels: TensorSpec | None = None
        self._specs: dict[str, GraphSpec] = {}
        self._graphs: dict[str, bytes] = {}
        weights = [name for name in part.read if name in owner.program.weights]
        trains = part.mode is not Mode.FROZEN
        self._trained = [n for n in weights if trains and n in owner.trainable]
        self._statistics: tuple[RunningStatistic, ...] = ()
        if part.batch_statistics:
            g = owner.builder()
            self._statistics = running_statistics(
                g, part.nodes, owner.program.weights.keys()
            )
        kept = {n for s in self._statistics for n in (s.mean, s.variance)}
        self._inputs = [n for n in weights if n in kept or n in self._trained]
        self._inlined = [n for n in weights if n not in self._inputs]

    def add_fused(self) -> None:
        """`loss`: the last stage's loss, gradients and upstream cotangents in one graph."""
        g, nodes, statistics = self._training_forward()
        criterion = attach(g, self._part.loss, self._part.target)
        self._labels = criterion.labels
        wrt = [*self._trained, *self._part.wanted_upstream]
        found = vjp(g, nodes, {criterion.target: criterion.cotangent}, wrt)
        loss = _port(g, criterion.loss, Role.LOSS)
        outputs = [loss, *statistics, *self._result_ports(g, found, ())]
        self._emit(g, GraphName.LOSS, outputs, g.nodes)

    def add_split(self) -> None:
        """`forward` gives the stash that `backward` takes, if any gradient is wanted."""
        g, nodes, statistics = self._training_forward()
        seeds = self._seeds(g, self._cotangents_in)
        wrt = [*self._trained, *self._part.wanted_upstream]
        found = vjp(g, nodes, seeds, wrt)
        outputs = self._result_ports(g, found, seeds.values())
        stash = self._emit(g, GraphName.BACKWARD, outputs, g.nodes[len(nodes) :])
        forward = [*self._made_ports(g, self._part.sends, Role.ACTIVATION), *statistics]
        self._emit(g, GraphName.FORWARD, [*forward, *stash], nodes)

    def add_perturbed(self) -> None:
        """`forward` alone, and `contract`: exact gradients from the last linear op on."""
        g = self._inference_forward()
        nodes = list(g.nodes)
        forward = self._made_ports(g, self._part.sends, Role.ACTIVATION)
        ends = self._cotangents_in
        if self._part.target:
            ends = (self._part.target,)
            forward.append(_port(g, self._part.target, Role.ACTIVATION))
            self._add_criterion()
        seeds = self._seeds(g, ends)
        found = vjp(g, nodes, seeds, self._tail_weights())
        outputs = self._result_ports(g, found, seeds.values())
        stash = self._emit(g, GraphName.CONTRACT, outputs, g.nodes[len(nodes) :])
        self._emit(g, GraphName.FORWARD, [*forward, *stash], nodes)
        self._cotangents_out = self._part.wanted_upstream

    def add_evaluate(self) -> None:
        """`evaluate`: as deployed; the last stage also gives the loss of each sample."""
        g = self._inference_forward()
        if self._part.target:
            criterion = attach(g, self._part.loss, self._part.target)
            ports = self._made_ports(g, self._owner.program.outputs, Role.OUTPUT)
            ports.append(_port(g, criterion.loss, Role.LOSS))
        else:
            ports = self._made_ports(g, self._part.sends, Role.ACTIVATION)
        self._emit(g, GraphName.EVALUATE, ports, g.nodes)

    def bundle(self) -> Bundle:
        program, part = self._owner.program, self._part
        shapes = {n: program.weights[n].shape for n in self._inputs}
        layout, trainable_elements, elements = lay_out(shapes, frozenset(self._trained))
        weights = np.zeros(elements, np.float32)
        for spec in layout:
            view(weights, spec)[...] = program.weights[spec.name]
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
            outputs=program.outputs if part.target else (),
            loss=part.loss if part.target else "",
            weights=layout,
            elements=elements,
            trainable_elements=trainable_elements,
            statistics=self._statistics,
            graphs=self._specs,
        )
        return Bundle(manifest, self._graphs, weights)

    def _add_criterion(self) -> None:
        """`criterion`: the loss and its cotangent at the target, apart from the stage."""
        g = self._owner.builder()
        criterion = attach(g, self._part.loss, self._part.target)
        self._labels = criterion.labels
        kind = (g.dtype(criterion.target), g.shape(criterion.target))
        ports = [
            _port(g, criterion.loss, Role.LOSS),
            Port(criterion.cotangent, Role.COTANGENT, criterion.target, *kind),
        ]
        self._emit(g, GraphName.CRITERION, ports, g.nodes)

    def _training_forward(self) -> tuple[GraphBuilder, list[Node], list[Port]]:
        g = self._owner.builder(self._inlined)
        nodes: list[Node] = list(self._part.nodes)
        statistics: list[Port] = []
        if self._part.batch_statistics:
            nodes, statistics = use_batch_statistics(g, nodes)
        nodes = prepare(g, nodes)
        for node in nodes:
            g.append(node)
        return g, nodes, statistics

    def _inference_forward(self) -> GraphBuilder:
        g = self._owner.builder(self._inlined)
        for node in self._part.nodes:
            g.append(node)
        return g

    def _tail_weights(self) -> list[str]:
        """Trained weights of the stage's last linear op and of what follows it."""
        nodes = self._part.nodes
        trained = set(self._trained)
        linear = [
            index
            for index, node in enumerate(nodes)
            if node.op_type in LINEAR_OPS and trained & set(node.inputs)
        ]
        if not linear:
            return []
        before = {name for node in nodes[: linear[-1]] for name in node.inputs}
        after = {name for node in nodes[linear[-1] :] for name in node.inputs}
        return [name for name in self._trained if name in after - before]

    def _seeds(self, g: GraphBuilder, names: Iterable[str]) -> dict[str, str]:
        seeds = {name: COTANGENT + name for name in names}
        for name, seed in seeds.items():
            g.describe(seed, g.dtype(name), g.shape(name))
        return seeds

    def _made_ports(
        self, g: GraphBuilder, specs: Iterable[TensorSpec], role: Role
    ) -> list[Port]:
        return [_port(g, s.name, role) for s in specs if s.name in self._part.made]

    def _result_ports(
        self, g: GraphBuilder, found: Mapping[str, str], seeds: Collection[str]
    ) -> list[Port]:
        """Ports for gradients and upstream cotangents.

        A cotangent that merely passes through the stage is not the graph's business: the
        device hands it on. Every other one gets a name of its own.
        """
        upstream = [name for name in self._part.wanted_upstream if name in found]
        self._cotangents_out = tuple(upstream)
        ports: list[Port] = []
        taken = set(seeds)
        for key, name in found.items():
            role = Role.COTANGENT if key in upstream else Role.GRADIENT
            if role is Role.COTANGENT and name == COTANGENT + key:
                continue
            own = g("Identity", name) if name in taken else name
            taken.add(own)
            ports.append(Port(own, role, key, g.dtype(key), g.shape(key)))
        return ports

    def _emit(
        self,
        g: GraphBuilder,
        graph: GraphName,
        outputs: Sequence[Port],
        nodes: Sequence[Node],
    ) -> list[Port]:
        """Add a graph unless it would give nothing; returns the stash it takes."""
        if not outputs:
            return []
        live = live_nodes(nodes, {port.name for port in outputs})
        made = {name for node in live for name in node.outputs}
        read = dict.fromkeys(name for node in live for name in node.inputs if name)
        outer = [name for name in read if name not in made and not g.is_constant(name)]
        inputs = [self._input_port(g, name) for name in outer]
        model = g.model(
            [TensorSpec(p.name, p.dtype, p.shape) for p in inputs],
            [TensorSpec(p.name, p.dtype, p.shape) for p in outputs],
            f"stage{self._part.stage}/{graph}",
            live,
        )
        data = model.SerializeToString()
        self._graphs[graph] = data
        self._specs[graph] = GraphSpec(tuple(inputs), tuple(outputs), sha256(data))
        return [port for port in inputs if port.role is Role.STASH]

    def _input_port(self, g: GraphBuilder, name: str) -> Port:
        if name == LABELS:
            return _port(g, name, Role.LABELS)
        if name.startswith(COTANGENT):
            key = name.removeprefix(COTANGENT)
            return Port(name, Role.COTANGENT, key, g.dtype(name), g.shape(name))
        if name in self._inputs:
            return _port(g, name, Role.WEIGHT)
        if any(name == spec.name for spec in self._part.receives):
            return _port(g, name, Role.ACTIVATION)
        return _port(g, name, Role.STASH)


def _port(g: GraphBuilder, name: str, role: Role) -> Port:
    return Port(name, role, name, g.dtype(name), g.shape(name))
