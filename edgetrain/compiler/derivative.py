"""A model together with its derivative, as one graph with speaking names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from edgetrain.compiler.build import GraphBuilder, Node, Subgraph
from edgetrain.compiler.jvp import jvp
from edgetrain.compiler.loss import LABELS, Criterion, attach, target
from edgetrain.compiler.program import Program
from edgetrain.compiler.rules.shaping import zeros
from edgetrain.compiler.stage import pick_output
from edgetrain.compiler.values import constants, value_table
from edgetrain.compiler.vjp import prepare, vjp
from edgetrain.errors import GraphError
from edgetrain.losses import LossOptions
from edgetrain.tensors import TensorSpec

COTANGENT: Final = "cotangent/"
GRADIENT: Final = "gradient/"
TANGENT: Final = "tangent/"
LOSS: Final = "loss"
LOSSES: Final = "losses"


class Derivative:
    """A program's forward graph, to which one of the two modes is added.

    Args:
        program: the model.
        trained: the weights that become inputs; all others are constants.
    """

    def __init__(self, program: Program, trained: Collection[str]) -> None:
        self._program = program
        self._trained = [name for name in program.weights if name in trained]
        held = {n: np.asarray(w) for n, w in program.weights.items() if n not in trained}
        values = value_table(program.model)
        self._g = GraphBuilder(values, constants(program.model) | held)
        nodes = [Node.from_proto(proto) for proto in program.model.graph.node]
        self._nodes = prepare(self._g, nodes)
        for node in self._nodes:
            self._g.append(node)
        self._taken = {*values, *(name for node in self._nodes for name in node.outputs)}
        self._inputs = list(program.inputs)
        self._results = {spec.name: spec.name for spec in program.outputs}
        self._specs = {spec.name: spec for spec in program.outputs}
        self._criterion: Criterion | None = None

    def add_loss(self, loss: str, options: LossOptions, output: str) -> None:
        """Compare an output with the input ``labels``: gives ``loss`` and ``losses``.

        Raises:
            GraphError: the loss does not fit, or which output is meant is not clear.
        """
        chosen = pick_output(self._program, output, place="output")
        makers = {name: node for node in self._nodes for name in node.outputs}
        goal = target(loss, chosen, makers, options)
        self._claim(LABELS)
        self._criterion = attach(self._g, loss, goal, options)
        self._inputs.append(self._criterion.labels)
        kind = self._g.dtype(goal)
        mean = self._g("ReduceMean", self._criterion.loss, keepdims=0)
        self._give(TensorSpec(LOSS, kind, ()), mean)
        losses = self._criterion.loss
        self._give(TensorSpec(LOSSES, kind, self._g.shape(losses)), losses)

    def add_vjp(self) -> None:
        """Cotangents of the outputs in; gradients of the weights, cotangents of inputs out.

        With a loss the outputs' cotangents are its own, and inputs get none.

        Raises:
            UnsupportedOpError: an operator on the way has no rule.
        """
        inputs: list[str] = []
        if self._criterion:
            seeds = {self._criterion.target: self._criterion.cotangent}
        else:
            inputs = _float_names(self._program.inputs)
            seeds = self._beside(COTANGENT, _float_names(self._program.outputs))
        found = vjp(self._g, self._nodes, seeds, [*self._trained, *inputs])
        for name in self._trained:
            self._give_beside(GRADIENT, name, found)
        for name in inputs:
            self._give_beside(COTANGENT, name, found)

    def add_jvp(self) -> None:
        """Tangents of inputs and weights in; tangents of the outputs, or the loss, out.

        Raises:
            UnsupportedOpError: an operator on the way has no rule.
        """
        names = [*_float_names(self._program.inputs), *self._trained]
        found = jvp(self._g, self._nodes, self._beside(TANGENT, names))
        for name in _float_names(self._program.outputs):
            self._give_beside(TANGENT, name, found)
        if not self._criterion:
            return
        slope, moved = self._criterion.cotangent, found.get(self._criterion.target)
        spec = TensorSpec(TANGENT + LOSS, self._g.dtype(self._criterion.target), ())
        g = self._g
        total = g("ReduceSum", g("Mul", slope, moved), keepdims=0) if moved else None
        self._give(spec, total or zeros(g, (), self._criterion.target))

    def model(self, name: str) -> onnx.ModelProto:
        """The whole graph; trained weights are inputs that have a default value."""
        weights = [self._g.spec(name) for name in self._trained]
        model = self._g.model(
            [*self._inputs, *weights], self._specs.values(), name, self._named_nodes()
        )
        for weight in self._trained:
            value = np.asarray(self._program.weights[weight])
            model.graph.initializer.append(numpy_helper.from_array(value, weight))
        return model

    def _beside(self, prefix: str, names: Iterable[str]) -> dict[str, str]:
        """An input beside each of the values, of the same type and shape."""
        added = {name: prefix + name for name in names}
        for name, new in added.items():
            self._claim(new)
            self._g.describe(new, self._g.dtype(name), self._g.shape(name))
            self._inputs.append(self._g.spec(new))
        return added

    def _give_beside(self, prefix: str, name: str, found: Mapping[str, str]) -> None:
        """An output beside a value; zero where nothing depends on it."""
        shape, kind = self._g.shape(name), self._g.dtype(name)
        value = found.get(name) or zeros(self._g, shape, name)
        self._give(TensorSpec(prefix + name, kind, shape), value)

    def _give(self, spec: TensorSpec, value: str) -> None:
        self._claim(spec.name)
        self._results[spec.name] = value
        self._specs[spec.name] = spec

    def _claim(self, name: str) -> None:
        if name in self._taken:
            raise GraphError(
                f"the model has a value named {name!r}, which is the name of an input or"
                " output to add: rename it in the model"
            )
        self._taken.add(name)

    def _named_nodes(self) -> Sequence[Node]:
        """All nodes; what makes a result gives it its name."""
        emitted = self._g.nodes[len(self._nodes) :]
        free = {name for node in emitted for name in node.outputs}
        free -= {name for node in emitted for name in _captured(node)}
        names: dict[str, str] = {}
        copies = []
        for name, value in self._results.items():
            if value in free and value not in names:
                names[value] = name
            elif value != name:
                copies.append(Node("Identity", name, (value,), (name,)))
        return [
            replace(
                node,
                inputs=tuple(names.get(n, n) for n in node.inputs),
                outputs=tuple(names.get(n, n) for n in node.outputs),
            )
            for node in (*self._g.nodes, *copies)
        ]


def _float_names(specs: Iterable[TensorSpec]) -> list[str]:
    return [spec.name for spec in specs if spec.is_float]


def _captured(node: Node) -> Iterable[str]:
    """The values that a node's subgraphs use by name."""
    for attribute in node.attributes.values():
        if isinstance(attribute, Subgraph):
            yield from attribute.captured
