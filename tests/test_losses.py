"""The laws of losses: values, cotangents, and what does not depend on what."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_case import apply

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.loss import LOSSES, attach, labels_spec, target
from edgetrain.errors import ConfigError, GraphError
from edgetrain.losses import LOSSES as NAMES
from edgetrain.losses import (
    OPTIONS,
    PLAIN,
    LossOptions,
    check_loss,
    hit_share,
    with_mean_weight,
)
from edgetrain.tensors import TensorSpec

N, K = 5, 4
CROSS_ENTROPY = "softmax_cross_entropy"
WEIGHTS = (0.5, 2.0, 1.0, 0.25)
SOFT = LossOptions(soft_labels=True)
CASES = [
    (CROSS_ENTROPY, {}),
    (CROSS_ENTROPY, {"label_smoothing": 0.1}),
    (CROSS_ENTROPY, {"ignore_index": 2}),
    (CROSS_ENTROPY, {"class_weights": WEIGHTS}),
    (CROSS_ENTROPY, {"ignore_index": -100, "class_weights": WEIGHTS, "mean_weight": 0.7}),
    (CROSS_ENTROPY, {"ignore_index": 1, "class_weights": WEIGHTS, "label_smoothing": 0.3}),
    (CROSS_ENTROPY, {"soft_labels": True}),
    (CROSS_ENTROPY, {"soft_labels": True, "class_weights": WEIGHTS}),
    (CROSS_ENTROPY, {"soft_labels": True, "label_smoothing": 0.2}),
    ("bce_with_logits", {}),
    ("bce_with_logits", {"pos_weight": 3.0}),
    ("bce_with_logits", {"pos_weight": WEIGHTS}),
    ("mse", {}),
    ("l1", {}),
    ("huber", {}),
    ("huber", {"delta": 0.3}),
    ("cosine", {}),
]
IDS = ["-".join([name, *given]) for name, given in CASES]
CASES = [(name, LossOptions(**given)) for name, given in CASES]
SHAPES = {"rows": (N, K), "tokens": (N, 3, K)}


def logits(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)


def labels_of(name: str, options: LossOptions, output: np.ndarray) -> np.ndarray:
    """Random labels that fit; about a quarter of them ignored where some may be."""
    rng = np.random.default_rng(1)
    spec = labels_spec(name, TensorSpec("z", "float32", output.shape), options)
    if not spec.is_float:
        classes = output.shape[options.class_axis]
        drawn = rng.integers(0, classes, spec.shape)
        ignored = rng.random(spec.shape) < 0.25
        return np.where(ignored, options.ignore_index, drawn) if (
            options.ignore_index is not None
        ) else drawn  # fmt: skip
    if name == "bce_with_logits":
        return rng.integers(0, 2, spec.shape).astype(np.float32)
    drawn = rng.random(spec.shape, np.float32)
    return drawn / drawn.sum(-1, keepdims=True) if options.soft_labels else drawn


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_the_cotangent_is_the_slope_of_the_mean_loss(name, options, shape):
    z = logits(*shape).astype(np.float64)
    labels = labels_of(name, options, z.astype(np.float32))
    labels = labels.astype(np.float64) if labels.dtype.kind == "f" else labels
    direction = logits(*shape, seed=3).astype(np.float64)
    step = 1e-6
    ends = [apply(name, z + t * direction, labels, options)[0] for t in (step, -step)]
    slope = (ends[0].mean() - ends[1].mean()) / (2 * step)
    cotangent = apply(name, z, labels, options)[1]
    assert slope == pytest.approx((cotangent * direction).sum(), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_a_sample_s_loss_does_not_depend_on_the_others(name, options):
    """So the mean over a batch is that over its microbatches, however it is cut."""
    options = (
        msgspec.structs.replace(options, mean_weight=0.7) if options.weighs else options
    )
    z = logits(N, 3, K)
    labels = labels_of(name, options, z)
    losses, cotangent = apply(name, z, labels, options)
    for i in range(N):
        one = slice(i, i + 1)
        alone, slope = apply(name, z[one], labels[one], options)
        np.testing.assert_allclose(losses[one], alone, rtol=2e-6, atol=1e-7)
        np.testing.assert_allclose(cotangent[one] * N, slope, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_losses_stay_finite_at_the_ends_of_the_scale(name, options):
    """Logits that a run may reach: probabilities of exactly 0 and 1."""
    z = np.where(logits(N, K) > 0, np.float32(200), np.float32(-200))
    labels = labels_of(name, options, z)
    for result in apply(name, z, labels, options):
        assert np.isfinite(result).all()


def test_a_batch_of_which_nothing_counts_has_no_loss_and_no_gradient():
    options = LossOptions(ignore_index=-100)
    losses, cotangent = apply(CROSS_ENTROPY, logits(2, K), np.full(2, -100), options)
    assert not losses.any()
    assert not cotangent.any()


def test_what_is_ignored_gets_no_cotangent():
    options = LossOptions(ignore_index=255, label_smoothing=0.2)
    labels = np.array([255, 1, 255, 0, 3])
    cotangent = apply(CROSS_ENTROPY, logits(N, K), labels, options)[1]
    assert cotangent.any(axis=1).tolist() == [False, True, False, True, True]


@settings(max_examples=40, deadline=None)
@given(st.integers(-6, 8))
def test_any_index_may_be_ignored(index):
    """Also one that is a class, or that an engine would count from the end."""
    labels = np.where([True, False, True, False, False], index, [0, 3, 1, 2, 3])
    options = LossOptions(ignore_index=index, mean_weight=1.0)
    z = logits(N, K)
    losses, _ = apply(CROSS_ENTROPY, z, labels, options)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    counts = labels != index
    expected = -log_p[np.arange(N), np.where(counts, labels, 0)] * counts
    np.testing.assert_allclose(losses, expected, atol=1e-6)


def test_one_hot_labels_are_the_same_as_indices():
    z, indices = logits(N, K), np.array([0, 3, 1, 2, 3])
    hot = np.eye(K, dtype=np.float32)[indices]
    for hard, soft in [(PLAIN, SOFT), (LossOptions(label_smoothing=0.2),
                       LossOptions(label_smoothing=0.2, soft_labels=True))]:  # fmt: skip
        for a, b in zip(
            apply(CROSS_ENTROPY, z, indices, hard),
            apply(CROSS_ENTROPY, z, hot, soft),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("options", [o for name, o in CASES if name == CROSS_ENTROPY])
def test_the_classes_may_be_on_any_axis(options):
    z = logits(N, 3, K)
    labels = labels_of(CROSS_ENTROPY, options, z)
    losses, cotangent = apply(CROSS_ENTROPY, z, labels, options)
    moved = msgspec.structs.replace(options, class_axis=1)
    turned = labels.swapaxes(1, 2).copy() if options.soft_labels else labels
    other, slope = apply(CROSS_ENTROPY, z.swapaxes(1, 2).copy(), turned, moved)
    np.testing.assert_allclose(losses, other, rtol=1e-5)
    np.testing.assert_allclose(cotangent, slope.swapaxes(1, 2), atol=1e-6)


def test_a_vector_without_direction_has_no_gradient():
    z = np.zeros((2, 3), np.float32)
    z[1] = [3, 0, 0]
    losses, cotangent = apply("cosine", z, np.ones((2, 3), np.float32))
    np.testing.assert_allclose(losses, [1, 1 - 3**-0.5], rtol=1e-6)
    assert cotangent.any(axis=1).tolist() == [False, True]


def test_at_the_label_l1_is_flat():
    z = logits(2, 3)
    assert not apply("l1", z, z)[1].any()


# What fits


def test_every_loss_has_its_options():
    assert tuple(LOSSES) == NAMES == tuple(OPTIONS)
    assert {name for name, _ in CASES} == set(LOSSES)


def relu_output(op: str, **attributes: object) -> tuple[TensorSpec, dict[str, Node]]:
    spec = TensorSpec("y", "float32", (2, 3, 4))
    return spec, {"y": Node(op, op, ("z",), ("y",), attributes)}


@pytest.mark.parametrize(
    ("name", "op", "attributes", "class_axis", "absorbed"),
    [
        (CROSS_ENTROPY, "Softmax", {}, -1, True),
        (CROSS_ENTROPY, "Softmax", {"axis": 2}, -1, True),
        (CROSS_ENTROPY, "Softmax", {"axis": 1}, -1, False),
        (CROSS_ENTROPY, "Softmax", {"axis": -2}, 1, True),
        (CROSS_ENTROPY, "LogSoftmax", {}, 2, True),
        (CROSS_ENTROPY, "Sigmoid", {}, -1, False),
        ("bce_with_logits", "Sigmoid", {}, -1, True),
        ("mse", "Sigmoid", {}, -1, False),
    ],
)
def test_a_final_activation_is_part_of_the_loss(name, op, attributes, class_axis, absorbed):
    options = LossOptions(class_axis=class_axis)
    spec, nodes = relu_output(op, **attributes)
    assert target(name, spec, nodes, options) == ("z" if absorbed else "y")


@pytest.mark.parametrize(
    ("name", "shape", "options", "words"),
    [
        ("hinge", (2, 3), PLAIN, "choose one of softmax_cross_entropy"),
        (CROSS_ENTROPY, (4,), PLAIN, "two classes or more"),
        (CROSS_ENTROPY, (4, 1), PLAIN, "two classes or more"),
        (CROSS_ENTROPY, (4, 3), LossOptions(class_axis=2), r"axis 2 \(class_axis\)"),
        (CROSS_ENTROPY, (4, 3), LossOptions(class_axis=-2), r"axis -2 \(class_axis\)"),
        (CROSS_ENTROPY, (4, 3), LossOptions(class_weights=(1.0,)), "class_weights has 1"),
        ("bce_with_logits", (4, 3), LossOptions(pos_weight=(1.0,)), "pos_weight has 1"),
        ("cosine", (4,), PLAIN, "features"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(name, shape, options, words):
    g = GraphBuilder({"z": TensorSpec("z", "float32", shape)}, {})
    with pytest.raises(GraphError, match=words):
        attach(g, name, "z", options)


def test_a_loss_of_integers_is_refused():
    with pytest.raises(GraphError, match="float output"):
        labels_spec("mse", TensorSpec("z", "int64", (2, 3)))


@pytest.mark.parametrize("name", ["mse", "l1", "huber", "bce_with_logits"])
def test_an_output_of_one_number_a_sample_will_do(name):
    losses, _ = apply(name, logits(3), np.ones(3, np.float32))
    assert losses.shape == (3,)


# Options


@pytest.mark.parametrize(
    "wrong",
    [
        {"class_axis": 0},
        {"class_weights": (1.0, -1.0)},
        {"class_weights": (0.0, 0.0)},
        {"label_smoothing": 1.5},
        {"pos_weight": -1.0},
        {"pos_weight": (1.0, float("nan"))},
        {"delta": 0.0},
        {"mean_weight": 0.0},
        {"mean_weight": float("inf")},
    ],
)
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LossOptions(**wrong)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mse", LossOptions(delta=2.0), "takes no option 'delta'; it takes: none"),
        ("huber", LossOptions(ignore_index=0), "'ignore_index'; it takes: delta"),
        ("hubber", PLAIN, "did you mean 'huber'"),
        (CROSS_ENTROPY, LossOptions(soft_labels=True, ignore_index=0), "no index"),
        (CROSS_ENTROPY, LossOptions(mean_weight=0.5), "mean_weight needs"),
    ],
)
def test_options_that_a_loss_does_not_take_are_refused(name, options, words):
    with pytest.raises(ConfigError, match=words):
        check_loss("loss", name, options)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_options_that_a_loss_takes_are_accepted(name, options):
    check_loss("loss", name, options)


def test_the_mean_weight_of_all_labels_makes_the_mean_loss_that_of_all_positions():
    """So the losses of an epoch's microbatches average to the loss of the whole data."""
    free = LossOptions(ignore_index=-1, class_weights=WEIGHTS)
    z = logits(N, 3, K)
    labels = labels_of(CROSS_ENTROPY, free, z)
    settled = with_mean_weight(free, labels)
    assert settled.mean_weight == pytest.approx(
        np.where(labels < 0, 0, np.take(WEIGHTS, labels)).mean()
    )
    whole = apply(CROSS_ENTROPY, z, labels, free)
    parts = apply(CROSS_ENTROPY, z, labels, settled)
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-6)
    np.testing.assert_allclose(parts[1], whole[1], rtol=1e-5, atol=1e-8)


def test_a_mean_weight_is_settled_only_where_one_is_open():
    labels = np.array([0, 1, -1, -1])
    assert with_mean_weight(PLAIN, labels) is PLAIN
    given = LossOptions(ignore_index=-1, mean_weight=2.0)
    assert with_mean_weight(given, labels) is given
    free = LossOptions(ignore_index=-1)
    assert with_mean_weight(free, labels).mean_weight == 0.5
    assert with_mean_weight(free, None).mean_weight == 1.0
    with pytest.raises(ConfigError, match="no training label counts"):
        with_mean_weight(free, np.array([-1, -1]))


def test_hits_count_where_labels_count():
    scores = np.eye(3)[np.array([[0, 1, 2], [2, 2, 2], [0, 0, 0]])]
    labels = np.array([[0, 1, 1], [2, -1, -1], [-1, -1, -1]])
    plain = hit_share(scores, labels, PLAIN)
    np.testing.assert_allclose(plain, [2 / 3, 1 / 3, 0])
    ignoring = hit_share(scores, labels, LossOptions(ignore_index=-1))
    np.testing.assert_allclose(ignoring, [2 / 3, 1, 0])
    turned = hit_share(scores.swapaxes(1, 2), labels, LossOptions(class_axis=1))
    np.testing.assert_allclose(turned, plain)
