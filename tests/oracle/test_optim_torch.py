"""Optimizers, clipping and rates give what PyTorch's give."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.optim.flat import clip_factor, scale_, square_sum
from edgetrain.runtime.optim.lr import learning_rate
from edgetrain.runtime.optim.table import make

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

ELEMENTS = 501
STEPS = 50
RATE = LRSpec(0.02, "cosine", total_steps=STEPS, final=0.001)


def torch_optimizer(spec, parameters):
    lr, decay = spec.lr.base, spec.weight_decay
    if spec.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=lr,
            momentum=spec.momentum,
            nesterov=spec.nesterov,
            weight_decay=decay,
        )
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[spec.name]
    betas = (spec.beta1, spec.beta2)
    return kind(parameters, lr=lr, betas=betas, eps=spec.eps, weight_decay=decay)


SPECS = [
    OptimizerSpec("sgd", RATE, momentum=m, nesterov=n, weight_decay=d, clip_norm=c)
    for m, n, d, c in itertools.product((0.0, 0.9), (False, True), (0.0, 0.05), (None, 9.0))
    if m or not n
] + [
    OptimizerSpec(name, RATE, beta1=b1, beta2=b2, eps=e, weight_decay=d, clip_norm=c)
    for name, (b1, b2), e, d, c in itertools.product(
        ("adam", "adamw"),
        ((0.9, 0.999), (0.4, 0.95)),
        (1e-8, 1e-3),
        (0.0, 0.05),
        (None, 9.0),
    )
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_fifty_steps(spec):
    rng = np.random.default_rng(0)
    w = rng.standard_normal(ELEMENTS).astype(np.float32)
    twin = torch.nn.Parameter(torch.from_numpy(w.copy()))
    theirs, ours = torch_optimizer(spec, [twin]), make(spec, ELEMENTS)
    for step in range(STEPS):
        g = rng.standard_normal(ELEMENTS).astype(np.float32)
        twin.grad = torch.from_numpy(g.copy())
        if spec.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([twin], spec.clip_norm)
            scale_(g, clip_factor(square_sum(g), spec.clip_norm))
        lr = learning_rate(spec.lr, step)
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
        ours.step(w, g, lr)
    expected = twin.detach().numpy()
    assert np.abs(w - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("spec", "scheduler"),
    [
        (
            LRSpec(0.1, "cosine", total_steps=20, final=0.01),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.01),
        ),
        (
            LRSpec(0.1, "step", step_size=3, gamma=0.5),
            lambda o: torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5),
        ),
        (
            LRSpec(0.1, "linear", total_steps=20, final=0.01),
            lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=20),
        ),
    ],
    ids=["cosine", "step", "linear"],
)
def test_rates(spec, scheduler):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=spec.base)
    schedule = scheduler(optimizer)
    for step in range(21):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(spec, step) == pytest.approx(expected, rel=1e-9)
        optimizer.step()
        schedule.step()
