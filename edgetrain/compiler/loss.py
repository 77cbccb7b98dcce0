"""Losses: what the last stage minimises, with the cotangent of the model's output."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from edgetrain.compiler import loss_terms
from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.loss_terms import Terms
from edgetrain.compiler.rules.shaping import mask
from edgetrain.errors import GraphError
from edgetrain.losses import PLAIN, LossOptions
from edgetrain.tensors import TensorSpec

LABELS: Final = "labels"

# (builder, model output, labels, options) -> the loss's terms
Emit = Callable[[GraphBuilder, str, str, LossOptions], Terms]


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss.

    Attributes:
        emit: takes the output and the labels, gives the loss of every position.
        classes: labels are class indices, unless they are soft; otherwise they are of the
            output's type and shape.
        absorbs: ops a file may end with that the loss already contains.
    """

    emit: Emit
    classes: bool = False
    absorbs: frozenset[str] = frozenset()


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


# Of the same names as `edgetrain.losses.OPTIONS`.
LOSSES: Final[Mapping[str, Loss]] = {
    "softmax_cross_entropy": Loss(
        loss_terms.softmax_cross_entropy,
        classes=True,
        absorbs=frozenset({"Softmax", "LogSoftmax"}),
    ),
    "bce_with_logits": Loss(loss_terms.bce_with_logits, absorbs=frozenset({"Sigmoid"})),
    "mse": Loss(loss_terms.mse),
    "l1": Loss(loss_terms.l1),
    "huber": Loss(loss_terms.huber),
    "cosine": Loss(loss_terms.cosine),
}


def find(name: str) -> Loss:
    """The loss of that name.

    Raises:
        GraphError: there is none.
    """
    if name not in LOSSES:
        raise GraphError(f"unknown loss {name!r}: choose one of {', '.join(LOSSES)}")
    return LOSSES[name]


def target(
    name: str,
    output: TensorSpec,
    nodes: Mapping[str, Node],
    options: LossOptions = PLAIN,
) -> str:
    """The value the loss applies to: `output`, or what its final activation reads.

    Args:
        name: of the loss.
        output: the model's output.
        nodes: the node that makes each value.
        options: of the loss.
    """
    node = nodes.get(output.name)
    if node is None or node.op_type not in find(name).absorbs:
        return output.name
    if node.op_type != "Sigmoid":
        rank = len(output.shape)
        if (node.get("axis", -1) - options.class_axis) % max(1, rank):
            return output.name
    return node.input(0)


def labels_spec(name: str, output: TensorSpec, options: LossOptions = PLAIN) -> TensorSpec:
    """What labels of this loss look like for such an output.

    Raises:
        GraphError: the loss, or one of its options, does not fit the output.
    """
    if not output.is_float:
        raise GraphError(
            f"output {output.name!r} is {output.dtype}: a loss needs a float output."
            " Name another one with [model] output"
        )
    if find(name).classes:
        return _class_labels(name, output, options)
    shape = output.shape
    if name == "cosine" and len(shape) < 2:
        raise GraphError(
            f"loss 'cosine' needs an output of [samples, ..., features], {output.name!r}"
            f" has shape {list(shape)}. Use 'mse', or name another output"
        )
    if isinstance(options.pos_weight, tuple):
        _check_count("pos_weight", options.pos_weight, output, -1)
    return TensorSpec(LABELS, output.dtype, shape)


def _class_labels(name: str, output: TensorSpec, options: LossOptions) -> TensorSpec:
    shape, axis = output.shape, options.class_axis
    fits = len(shape) >= 2 and -len(shape) < axis < len(shape)
    if not fits or shape[axis] < 2:
        where = "" if axis == -1 else f" on axis {axis} (class_axis)"
        raise GraphError(
            f"loss {name!r} needs an output of [samples, classes] with two classes or"
            f" more{where}, {output.name!r} has shape {list(shape)}. Use 'mse' or"
            " 'bce_with_logits', or name another output with [model] output"
        )
    if options.class_weights:
        _check_count("class_weights", options.class_weights, output, axis)
    if options.soft_labels:
        return TensorSpec(LABELS, output.dtype, shape)
    place = axis % len(shape)
    return TensorSpec(LABELS, "int64", shape[:place] + shape[place + 1 :])


def _check_count(
    key: str, values: tuple[float, ...], output: TensorSpec, axis: int
) -> None:
    extent = output.shape[axis] if output.shape else 1
    if len(values) != extent:
        raise GraphError(
            f"loss_options: {key} has {len(values)} numbers, but axis {axis} of output"
            f" {output.name!r} of shape {list(output.shape)} needs {extent}"
        )


def attach(
    g: GraphBuilder, name: str, target: str, options: LossOptions = PLAIN
) -> Criterion:
    """Emit the loss of `target` against a graph input named ``labels``.

    The objective is the mean of the losses of the samples, each of them the mean over its
    positions: the same number as PyTorch's ``reduction="mean"``. Where positions are
    ignored or weighted, PyTorch divides by the batch's sum of weights; so does this, unless
    `options.mean_weight` m is given. Then every sample's loss is divided by m instead and
    depends on no other sample: the number is PyTorch's for a batch whose mean weight is m.
    Where no position counts it is 0, and not PyTorch's NaN.

    Args:
        g: the builder that knows `target`.
        name: one of `LOSSES`.
        target: a float value of shape [N, ...].
        options: of the loss.

    Raises:
        GraphError: no such loss, or it does not fit `target`.
    """
    loss = find(name)
    spec = g.spec(target)
    labels = labels_spec(name, spec, options)
    g.describe(LABELS, labels.dtype, labels.shape)
    terms = loss.emit(g, target, LABELS, options)
    values = terms.values
    if len(terms.shape) > 1:
        axes = g.ints(*range(1, len(terms.shape)))
        values = g("ReduceMean", values, axes, keepdims=0)
    scale = g.scalar(1 / max(1, math.prod(terms.shape)), target)
    if terms.weights:
        divisor = _mean_weight(g, terms.weights, target, options)
        values, scale = g("Div", values, divisor), g("Div", scale, divisor)
    scaled = g("Mul", terms.cotangent, scale)
    g.describe(values, spec.dtype, spec.shape[:1])
    g.describe(scaled, spec.dtype, spec.shape)
    return Criterion(target, labels, values, scaled)


def _mean_weight(g: GraphBuilder, weights: str, target: str, options: LossOptions) -> str:
    """A scalar; 1 for a batch of which no position counts."""
    if options.mean_weight is not None:
        return g.scalar(options.mean_weight, target)
    mean = g("ReduceMean", weights, keepdims=0)
    return g("Add", mean, mask(g, "Equal", mean, g.scalar(0, target), like=target))
