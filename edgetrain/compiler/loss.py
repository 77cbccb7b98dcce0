"""Losses: what the last stage minimises, with the cotangent of the model's output."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.errors import GraphError
from edgetrain.tensors import TensorSpec

LABELS: Final = "labels"

# (builder, model output, labels, positions a sample) -> (values, cotangent of their sum)
Emit = Callable[[GraphBuilder, str, str], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss.

    Attributes:
        emit: takes the output and the labels, gives the loss of every position and the
            cotangent of their sum at the output.
        classes: labels are class indices over the output's last axis; otherwise they are
            float32 of the output's shape.
        absorbs: the op a file may end with that the loss already contains.
    """

    emit: Emit
    classes: bool
    absorbs: str


@dataclass(frozen=True, slots=True)
class Criterion:
    """A loss attached to a graph.

    Attributes:
        target: the value it is applied to: the model's output, or what feeds the final
            Softmax or Sigmoid that the loss already contains.
        labels: what the labels must look like.
        loss: value of shape [N], the loss of each sample.
        cotangent: of `target`, for the mean of `loss`.
    """

    target: str
    labels: TensorSpec
    loss: str
    cotangent: str


def _softmax_cross_entropy(g: GraphBuilder, output: str, labels: str) -> tuple[str, str]:
    """-log softmax(z)[label]; cotangent softmax(z) - onehot(label)."""
    classes = g.shape(output)[-1]
    log_p = g("LogSoftmax", output, axis=-1)
    values = g.constant([0, 1], g.dtype(output))
    onehot = g("OneHot", labels, g.constant(classes, "int64"), values, axis=-1)
    loss = g("Neg", g("ReduceSum", g("Mul", log_p, onehot), g.ints(-1), keepdims=0))
    return loss, g("Sub", g("Exp", log_p), onehot)


def _mse(g: GraphBuilder, output: str, labels: str) -> tuple[str, str]:
    """(z - y)^2; cotangent 2 (z - y)."""
    error = g("Sub", output, labels)
    return g("Mul", error, error), g("Add", error, error)


def _bce_with_logits(g: GraphBuilder, output: str, labels: str) -> tuple[str, str]:
    """max(z, 0) - z y + log(1 + exp(-|z|)); cotangent sigmoid(z) - y."""
    tail = g("Log", g("Add", g.scalar(1, output), g("Exp", g("Neg", g("Abs", output)))))
    linear = g("Sub", g("Relu", output), g("Mul", output, labels))
    return g("Add", linear, tail), g("Sub", g("Sigmoid", output), labels)


LOSSES: Final[Mapping[str, Loss]] = {
    "softmax_cross_entropy": Loss(_softmax_cross_entropy, classes=True, absorbs="Softmax"),
    "mse": Loss(_mse, classes=False, absorbs=""),
    "bce_with_logits": Loss(_bce_with_logits, classes=False, absorbs="Sigmoid"),
}


def find(name: str) -> Loss:
    """The loss of that name.

    Raises:
        GraphError: there is none.
    """
    if name not in LOSSES:
        raise GraphError(f"unknown loss {name!r}: choose one of {', '.join(LOSSES)}")
    return LOSSES[name]


def target(name: str, output: TensorSpec, nodes: Mapping[str, Node]) -> str:
    """The value the loss applies to: `output`, or what its final activation reads.

    Args:
        name: of the loss.
        output: the model's output.
        nodes: the node that makes each value.
    """
    node = nodes.get(output.name)
    if node is None or node.op_type != find(name).absorbs:
        return output.name
    axis = node.get("axis", -1)
    if node.op_type == "Softmax" and axis not in (-1, len(output.shape) - 1):
        return output.name
    return node.input(0)


def labels_spec(name: str, output: TensorSpec) -> TensorSpec:
    """What labels of this loss look like for such an output.

    Raises:
        GraphError: the loss does not fit the output.
    """
    shape = output.shape
    if not output.is_float:
        raise GraphError(
            f"output {output.name!r} is {output.dtype}: a loss needs a float output."
            " Name another one with [model] output"
        )
    if not find(name).classes:
        return TensorSpec(LABELS, output.dtype, shape)
    if len(shape) < 2 or shape[-1] < 2:
        raise GraphError(
            f"loss {name!r} needs an output of [samples, classes] with two classes or more,"
            f" {output.name!r} has shape {list(shape)}. Use 'mse' or 'bce_with_logits', or"
            " name another output with [model] output"
        )
    return TensorSpec(LABELS, "int64", shape[:-1])


def attach(g: GraphBuilder, name: str, target: str) -> Criterion:
    """Emit the loss of `target` against a graph input named ``labels``.

    The objective is the mean over samples, and over positions within a sample: the same
    number as PyTorch's ``reduction="mean"``.

    Args:
        g: the builder that knows `target`.
        name: one of `LOSSES`.
        target: a float value of shape [N, ...].

    Raises:
        GraphError: no such loss, or it does not fit `target`.
    """
    loss = find(name)
    spec = g.spec(target)
    labels = labels_spec(name, spec)
    g.describe(LABELS, labels.dtype, labels.shape)
    values, cotangent = loss.emit(g, target, LABELS)
    positions = math.prod(labels.shape[1:])
    if len(labels.shape) > 1:
        axes = g.ints(*range(1, len(labels.shape)))
        values = g("ReduceMean", values, axes, keepdims=0)
    scale = g.scalar(1 / (spec.shape[0] * positions), target)
    scaled = g("Mul", cotangent, scale)
    g.describe(values, spec.dtype, spec.shape[:1])
    g.describe(scaled, spec.dtype, spec.shape)
    return Criterion(target, labels, values, scaled)
