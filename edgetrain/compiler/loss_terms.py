"""The nodes of each loss: its value at every position, and the cotangent of their sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from edgetrain.compiler.build import GraphBuilder
from edgetrain.compiler.rules.shaping import mask
from edgetrain.losses import LossOptions

# Below this length a vector has no direction, and the cosine loss no gradient.
SHORTEST: Final = 1e-8


@dataclass(frozen=True, slots=True)
class Terms:
    """What a loss emits.

    Attributes:
        values: the loss at every position.
        shape: of `values`: the output's, or the output's without one axis.
        cotangent: at the output, of the sum of `values`.
        weights: of the positions, of `shape`; empty where all weigh 1.
    """

    values: str
    shape: tuple[int, ...]
    cotangent: str
    weights: str = ""


def softmax_cross_entropy(
    g: GraphBuilder, output: str, labels: str, options: LossOptions
) -> Terms:
    """-sum_c q_c log softmax(z)_c; cotangent (sum_c q_c) softmax(z) - q.

    The target q is the label's one-hot row or the soft label, smoothed to
    (1 - s) q + s / classes, times the class weights; all zero where the label is ignored.

    Source: PyTorch's CrossEntropyLoss. The classes may be on any axis; soft labels need
    not add up to 1.
    """
    shape = g.shape(output)
    axis = options.class_axis % len(shape)
    along = g.ints(axis)
    q, weights = _targets(g, output, labels, options)
    log_p = g("LogSoftmax", output, axis=axis)
    values = g("Neg", g("ReduceSum", g("Mul", log_p, q), along, keepdims=0))
    p = g("Exp", log_p)
    if options.weighs or options.soft_labels:
        p = g("Mul", p, g("ReduceSum", q, along, keepdims=1))
    positions = shape[:axis] + shape[axis + 1 :]
    return Terms(values, positions, g("Sub", p, q), weights)


def _targets(
    g: GraphBuilder, output: str, labels: str, options: LossOptions
) -> tuple[str, str]:
    """The target at every class, and the weight of every position (empty: 1)."""
    axis = options.class_axis % g.rank(output)
    along, smoothing = g.ints(axis), options.label_smoothing
    target = labels if options.soft_labels else _onehot(g, output, labels, options)
    even = g.scalar(smoothing / g.shape(output)[axis], output)
    if options.ignore_index is not None:
        even = g("Mul", even, g("ReduceSum", target, along, keepdims=1))
    factors = _class_factors(g, output, options)
    weighted = g("Mul", target, factors) if factors else target
    weights = g("ReduceSum", weighted, along, keepdims=0) if options.weighs else ""
    if smoothing:
        even = g("Mul", even, factors) if factors else even
        weighted = g("Add", g("Mul", weighted, g.scalar(1 - smoothing, output)), even)
    return weighted, weights


def _onehot(g: GraphBuilder, output: str, labels: str, options: LossOptions) -> str:
    """1 at each label's class; a row of zeros where the label is ignored.

    On ONNX Runtime's CPU comparing is up to three times as fast as `OneHot`, and what it
    does with indices that are no class is the same on every engine.
    """
    axis = options.class_axis % g.rank(output)
    count = g.shape(output)[axis]
    classes = np.arange(count)
    # No label has the number `count`, so an ignored class matches nothing.
    classes[classes == options.ignore_index] = count
    along = [1] * g.rank(output)
    along[axis] = count
    column = g("Unsqueeze", labels, g.ints(axis))
    return mask(g, "Equal", column, g.constant(classes.reshape(along)), like=output)


def _class_factors(g: GraphBuilder, output: str, options: LossOptions) -> str:
    """The class weights, shaped to broadcast over the output; empty where all are 1."""
    if not options.class_weights:
        return ""
    shape = [1] * g.rank(output)
    shape[options.class_axis] = -1
    factors = np.asarray(options.class_weights, g.dtype(output))
    return g.constant(factors.reshape(shape))


def bce_with_logits(
    g: GraphBuilder, output: str, labels: str, options: LossOptions
) -> Terms:
    """p y log(1 + e^-z) + (1 - y) log(1 + e^z), p the weight of label 1.

    Cotangent (1 - y + p y) sigmoid(z) - p y. Source: PyTorch's BCEWithLogitsLoss.
    """
    negative = g("Sub", g.scalar(1, output), labels)
    positive = labels
    if options.pos_weight != 1.0:
        factor = g.constant(np.asarray(options.pos_weight, g.dtype(output)))
        positive = g("Mul", labels, factor)
    values = g(
        "Add",
        g("Mul", positive, g("Softplus", g("Neg", output))),
        g("Mul", negative, g("Softplus", output)),
    )
    rise = g("Mul", g("Add", negative, positive), g("Sigmoid", output))
    return Terms(values, g.shape(output), g("Sub", rise, positive))


def mse(g: GraphBuilder, output: str, labels: str, _options: LossOptions) -> Terms:
    """(z - y)^2; cotangent 2 (z - y)."""
    error = g("Sub", output, labels)
    return Terms(g("Mul", error, error), g.shape(output), g("Add", error, error))


def l1(g: GraphBuilder, output: str, labels: str, _options: LossOptions) -> Terms:
    """|z - y|; cotangent sign(z - y).

    At z = y the derivative is anything in -1 ... 1; the cotangent is 0, as PyTorch's.
    """
    error = g("Sub", output, labels)
    return Terms(g("Abs", error), g.shape(output), g("Sign", error))


def huber(g: GraphBuilder, output: str, labels: str, options: LossOptions) -> Terms:
    """e^2 / 2 up to |e| = d, then d (|e| - d / 2), for e = z - y; cotangent c.

    With c = e clipped to -d ... d both are c (e - c / 2). Source: PyTorch's HuberLoss.
    """
    error = g("Sub", output, labels)
    low, high = g.scalar(-options.delta, output), g.scalar(options.delta, output)
    clipped = g("Clip", error, low, high)
    inner = g("Sub", error, g("Mul", clipped, g.scalar(0.5, output)))
    return Terms(g("Mul", clipped, inner), g.shape(output), clipped)


def cosine(g: GraphBuilder, output: str, labels: str, _options: LossOptions) -> Terms:
    """1 - u.v for u = z / |z| and v = y / |y| along the last axis.

    Cotangent ((u.v) u - v) / |z|. A vector shorter than `SHORTEST` has no direction: its
    loss is 1, and its cotangent 0, where PyTorch's cosine_similarity divides by 1e-8.
    """
    inverse = _inverse_length(g, output)
    u = g("Mul", output, inverse)
    v = g("Mul", labels, _inverse_length(g, labels))
    last = g.ints(-1)
    cos = g("ReduceSum", g("Mul", u, v), last, keepdims=1)
    values = g("Squeeze", g("Sub", g.scalar(1, output), cos), last)
    cotangent = g("Mul", g("Sub", g("Mul", cos, u), v), inverse)
    return Terms(values, g.shape(output)[:-1], cotangent)


def _inverse_length(g: GraphBuilder, vectors: str) -> str:
    """1 / |x| along the last axis, which stays; 0 for an x that has no direction."""
    length = g("ReduceL2", vectors, g.ints(-1), keepdims=1)
    shortest = g.scalar(SHORTEST, vectors)
    long_enough = mask(g, "Greater", length, shortest, like=vectors)
    return g("Div", long_enough, g("Max", length, shortest))
