"""Every loss and option against PyTorch's, in value and cotangent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from edgetrain.losses import LossOptions
from tests.loss_case import apply

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

F = torch.nn.functional
Reference = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
K = 4
SHAPES = {"rows": (6, K), "tokens": (6, 5, K)}
WEIGHTS = (0.5, 2.0, 1.0, 0.25)
RNG = np.random.default_rng


def check(
    name: str, options: dict[str, Any], z: np.ndarray, y: np.ndarray, reference: Reference
) -> None:
    """Compare with `reference`, and its cotangent with autograd's."""
    torch.set_num_threads(1)
    leaf = torch.tensor(z.astype(np.float64), requires_grad=True)
    labels = torch.tensor(y if y.dtype.kind == "i" else y.astype(np.float64))
    expected = reference(leaf, labels)
    expected.backward()
    losses, cotangent = apply(name, z, y, LossOptions(**options))
    assert losses.mean() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    scale = leaf.grad.abs().max().item()
    np.testing.assert_allclose(cotangent, leaf.grad.numpy(), rtol=0, atol=2e-6 * scale)


def cross_entropy(z: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
    """PyTorch's, which has the classes on axis 1."""
    soft = y.is_floating_point()
    return F.cross_entropy(z.movedim(-1, 1), y.movedim(-1, 1) if soft else y, **options)


def weights() -> torch.Tensor:
    return torch.tensor(WEIGHTS, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return RNG(seed).normal(0, 2, shape).astype(np.float32)


def indices(shape: tuple[int, ...], ignored: int | None = None) -> np.ndarray:
    drawn = RNG(1).integers(0, K, shape[:-1])
    if ignored is not None:
        drawn.flat[::3] = ignored
    return drawn


def probabilities(shape: tuple[int, ...]) -> np.ndarray:
    return RNG(2).dirichlet(np.ones(K), shape[:-1]).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [None, -100, 2])
def test_class_indices(shape, smoothing, weighted, ignored):
    ours: dict[str, Any] = {"label_smoothing": smoothing}
    theirs: dict[str, Any] = {"label_smoothing": smoothing}
    if weighted:
        ours["class_weights"], theirs["weight"] = WEIGHTS, weights()
    if ignored is not None:
        ours["ignore_index"] = theirs["ignore_index"] = ignored
    reference = partial(cross_entropy, **theirs)
    y = indices(shape, ignored)
    check("softmax_cross_entropy", ours, normal(*shape), y, reference)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_soft_labels(shape, smoothing, weighted):
    ours: dict[str, Any] = {"label_smoothing": smoothing, "soft_labels": True}
    theirs: dict[str, Any] = {"label_smoothing": smoothing}
    if weighted:
        ours["class_weights"], theirs["weight"] = WEIGHTS, weights()
    reference = partial(cross_entropy, **theirs)
    y = probabilities(shape)
    check("softmax_cross_entropy", ours, normal(*shape), y, reference)


def test_classes_on_the_axis_of_channels():
    z = normal(2, K, 3, 5)
    y = RNG(1).integers(0, K, (2, 3, 5))
    check("softmax_cross_entropy", {"class_axis": 1}, z, y, F.cross_entropy)


def test_with_a_mean_weight_the_loss_is_the_sum_over_a_fixed_count():
    shape = SHAPES["tokens"]
    y = indices(shape, -100)
    options = {"ignore_index": -100, "class_weights": WEIGHTS, "mean_weight": 0.8}

    def reference(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = cross_entropy(z, y, weight=weights(), reduction="sum")
        return total / (y.numel() * 0.8)

    check("softmax_cross_entropy", options, normal(*shape), y, reference)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("pos_weight", [1.0, 3.0, WEIGHTS])
def test_binary_cross_entropy(shape, pos_weight):
    factor = torch.tensor(pos_weight, dtype=torch.float64)
    reference = partial(F.binary_cross_entropy_with_logits, pos_weight=factor)
    y = RNG(3).random(shape, np.float32)
    check("bce_with_logits", {"pos_weight": pos_weight}, normal(*shape) * 5, y, reference)


def one_minus_cosine(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (1 - F.cosine_similarity(z, y, dim=-1)).mean()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("name", "options", "reference"),
    [
        ("mse", {}, F.mse_loss),
        ("l1", {}, F.l1_loss),
        ("huber", {}, F.huber_loss),
        ("huber", {"delta": 0.3}, partial(F.huber_loss, delta=0.3)),
        ("cosine", {}, one_minus_cosine),
    ],
)
def test_regression(shape, name, options, reference):
    z, y = normal(*shape), normal(*shape, seed=4)
    z.flat[0] = y.flat[0]
    check(name, options, z, y, reference)
