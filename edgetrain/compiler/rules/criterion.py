"""Losses as operators: SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss.

Both see their scores as [N, C, D]: samples, classes, and positions laid flat. With class
weights w, labels y and log-probabilities l the loss of a position is -w[y] * l[y], and
"mean" divides their sum by that of w[y]. Labels that are `ignore_index` count nowhere; when
all are, the mean is 0 / 0 and so are its derivatives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents, add_all
from edgetrain.compiler.rules.shaping import mask, reshape, sum_axes


@dataclass(frozen=True, slots=True)
class _Targets:
    """The labels of a loss node.

    Attributes:
        shape: N, C and D.
        hits: [N, C, D], 1.0 at the label of each position that is not ignored.
        weighted: `hits` times the class weights.
        total: scalar that divides the sum: of `weighted` for "mean", else None.
    """

    shape: tuple[int, int, int]
    hits: str
    weighted: str
    total: str | None


def _targets(g: GraphBuilder, node: Node) -> _Targets:
    scores, labels = node.inputs[:2]
    n, classes, *rest = g.shape(scores)
    shape = (n, classes, math.prod(rest))
    every = g.constant(np.arange(classes).reshape(1, classes, 1), g.dtype(labels))
    hits = mask(g, "Equal", reshape(g, labels, (n, 1, shape[2])), every, like=scores)
    ignored = node.get("ignore_index", None)
    if ignored is not None:
        # A label outside the classes hits none, so only a class can need leaving out.
        counted = (np.arange(classes) != ignored).reshape(1, classes, 1)
        hits = g("Mul", hits, g.constant(counted, g.dtype(scores)))
    weight = node.input(2)
    weighted = g("Mul", hits, reshape(g, weight, (1, classes, 1))) if weight else hits
    mean = node.get("reduction", "mean") == "mean"
    total = sum_axes(g, weighted, [0, 1, 2]) if mean else None
    return _Targets(shape, hits, weighted, total)


def nll_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Cotangents of log-probabilities and class weights."""
    t = _targets(g, node)
    log_p = reshape(g, node.inputs[0], t.shape)
    dlog_p, dweight = _loss_vjp(g, node, t, log_p, dy)
    return reshape(g, dlog_p, g.shape(node.inputs[0])), None, dweight


def nll_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    t = _targets(g, node)
    log_p = reshape(g, node.inputs[0], t.shape)
    moved = tangents[0] and reshape(g, tangents[0], t.shape)
    return _loss_jvp(g, node, t, log_p, (moved, (*tangents, None)[2]))


def cross_entropy_vjp(g: GraphBuilder, node: Node, dys: Cotangents) -> Cotangents:
    """Cotangents of scores and class weights, from the loss and the log-probabilities."""
    scores = node.inputs[0]
    t = _targets(g, node)
    log_p = _log_softmax(g, node, t)
    dloss, dgiven = (*dys, None)[:2]
    dlog_p, dweight = (
        _loss_vjp(g, node, t, log_p, dloss) if dloss else (None, None)
    )  # fmt: skip
    total = add_all(g, dlog_p, dgiven and reshape(g, dgiven, t.shape))
    if total is None:
        return ()
    lost = g("Mul", g("Exp", log_p), sum_axes(g, total, [1], keepdims=True))
    return reshape(g, g("Sub", total, lost), g.shape(scores)), None, dweight


def cross_entropy_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> Tangents:
    t = _targets(g, node)
    log_p = _log_softmax(g, node, t)
    tscores, tweight = tangents[0], (*tangents, None)[2]
    moved = None
    if tscores:
        rows = reshape(g, tscores, t.shape)
        mean = sum_axes(g, g("Mul", g("Exp", log_p), rows), [1], keepdims=True)
        moved = g("Sub", rows, mean)
    given = moved and reshape(g, moved, g.shape(node.inputs[0]))
    return _loss_jvp(g, node, t, log_p, (moved, tweight)), given


def _log_softmax(g: GraphBuilder, node: Node, t: _Targets) -> str:
    return g("LogSoftmax", reshape(g, node.inputs[0], t.shape), axis=1)


def _loss_vjp(
    g: GraphBuilder, node: Node, t: _Targets, log_p: str, dy: str
) -> tuple[str, str | None]:
    """Cotangents of the log-probabilities, [N, C, D], and of the class weights, [C]."""
    n, _, positions = t.shape
    seed = g("Neg", g("Div", dy, t.total) if t.total else dy)
    if node.get("reduction", "mean") == "none":
        seed = reshape(g, seed, (n, 1, positions))
    dlog_p = g("Mul", t.weighted, seed)
    if not node.input(2):
        return dlog_p, None
    value = g("Add", log_p, node.output) if t.total else log_p
    return dlog_p, sum_axes(g, g("Mul", g("Mul", t.hits, value), seed), [0, 2])


def _loss_jvp(
    g: GraphBuilder,
    node: Node,
    t: _Targets,
    log_p: str,
    tangents: tuple[str | None, str | None],
) -> str | None:
    """Of the loss, from tangents of the log-probabilities and of the class weights."""
    moved, tweight = tangents
    by_weight = None
    if tweight:
        value = g("Add", log_p, node.output) if t.total else log_p
        column = reshape(g, tweight, (1, t.shape[1], 1))
        by_weight = g("Mul", g("Mul", t.hits, value), column)
    total = add_all(g, moved and g("Mul", t.weighted, moved), by_weight)
    if total is None:
        return None
    if node.get("reduction", "mean") == "none":
        return reshape(g, g("Neg", sum_axes(g, total, [1])), g.shape(node.output))
    loss = g("Neg", sum_axes(g, total, [0, 1, 2]))
    return g("Div", loss, t.total) if t.total else loss
