"""Optimizers against their formulas, and the laws of norms, states and rates."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain import train_config
from edgetrain.errors import ConfigError
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.optim.flat import (
    BLOCK,
    blocks,
    clip_factor,
    scale_,
    square_sum,
)
from edgetrain.runtime.optim.lr import KINDS, learning_rate
from edgetrain.runtime.optim.table import OPTIMIZERS, make

LR = LRSpec(0.1)
SPECS = [
    OptimizerSpec("sgd", LR),
    OptimizerSpec("sgd", LR, weight_decay=0.1),
    OptimizerSpec("sgd", LR, momentum=0.9, weight_decay=0.1),
    OptimizerSpec("sgd", LR, momentum=0.9, nesterov=True),
    OptimizerSpec("adam", LR, weight_decay=0.1),
    OptimizerSpec("adamw", LR, weight_decay=0.1, beta1=0.8, beta2=0.9),
]


def draw(seed, elements):
    return np.random.default_rng(seed).standard_normal(elements).astype(np.float32)


def ids(spec):
    return f"{spec.name}-{spec.momentum}-{spec.nesterov}-{spec.weight_decay}"


def reference(spec, w, gradients, lr):
    """The textbook form, in float64."""
    w = w.astype(np.float64)
    first, second = np.zeros_like(w), np.zeros_like(w)
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.astype(np.float64)
        if spec.name == "adamw":
            w = w - lr * spec.weight_decay * w
        else:
            g = g + spec.weight_decay * w
        if spec.name == "sgd":
            first = spec.momentum * first + g
            w = w - lr * (g + spec.momentum * first if spec.nesterov else first)
            continue
        first = spec.beta1 * first + (1 - spec.beta1) * g
        second = spec.beta2 * second + (1 - spec.beta2) * g * g
        mean, square = first / (1 - spec.beta1**t), second / (1 - spec.beta2**t)
        w = w - lr * mean / (np.sqrt(square) + spec.eps)
    return w


@pytest.mark.parametrize("spec", SPECS, ids=ids)
@pytest.mark.parametrize("elements", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_formula_at_the_block_edges(spec, elements):
    w = draw(0, elements)
    gradients = [draw(seed, elements) for seed in range(1, 5)]
    expected = reference(spec, w, gradients, 0.05)
    optimizer = make(spec, elements)
    for gradient in gradients:
        before = gradient.copy()
        optimizer.step(w, gradient, 0.05)
        np.testing.assert_array_equal(gradient, before)
    np.testing.assert_allclose(w, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_a_restored_optimizer_goes_on_bit_for_bit(spec):
    elements = BLOCK + 3
    w, straight = draw(0, elements), make(spec, elements)
    for seed in range(1, 4):
        straight.step(w, draw(seed, elements), 0.01)
    saved, resumed_w = straight.state(), w.copy()
    straight.step(w, draw(9, elements), 0.01)  # a saved state is a copy
    resumed = make(spec, elements)
    resumed.load(saved)
    resumed.step(resumed_w, draw(9, elements), 0.01)
    np.testing.assert_array_equal(resumed_w, w)


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_stages_update_as_the_whole_model_does(spec):
    whole_w = draw(0, 100)
    parts_w = [whole_w[:33].copy(), whole_w[33:].copy()]
    whole, parts = make(spec, 100), [make(spec, 33), make(spec, 67)]
    for seed in range(1, 4):
        g = draw(seed, 100)
        whole.step(whole_w, g, 0.01)
        for optimizer, w, part in zip(parts, parts_w, (g[:33], g[33:]), strict=True):
            optimizer.step(w, part, 0.01)
    np.testing.assert_array_equal(np.concatenate(parts_w), whole_w)


@pytest.mark.parametrize("spec", SPECS[2:], ids=ids)
def test_a_state_of_another_optimizer_is_refused(spec):
    optimizer = make(spec, 8)
    before = optimizer.state()
    for state in ({}, make(spec, 9).state(), {**before, "extra": np.zeros(1)}):
        with pytest.raises(ConfigError, match="resume with the optimizer"):
            optimizer.load(state)
    assert all(np.array_equal(before[k], v) for k, v in optimizer.state().items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "adagrad"}, "'adagrad' is unknown: use one of sgd, adam, adamw"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"momentum": math.nan}, "momentum is nan"),
        ({"beta2": 1.0}, "beta2 is 1.0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"eps": math.inf}, "eps is inf"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"nesterov": True}, "nesterov needs a momentum"),
    ],
)
def test_bad_optimizers_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        make(OptimizerSpec(**{"name": "sgd", "lr": LR, **options}), 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"kind": "cosin"},
            "'cosin' is unknown: use one of constant, cosine, step, linear",
        ),
        ({"base": -1.0}, "lr base is -1.0"),
        ({"base": math.nan}, "lr base is nan"),
        ({"kind": "step"}, "step_size of at least 1"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"kind": "cosine", "total_steps": 5, "warmup_steps": 5}, "got 5 and 5"),
    ],
)
def test_bad_rates_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        make(OptimizerSpec("sgd", LRSpec(**{"base": 0.1, **options})), 1)


def test_every_name_of_a_run_file_is_in_the_tables():
    assert set(OPTIMIZERS) == set(train_config.OPTIMIZERS)
    assert set(KINDS) == set(train_config.LR_SCHEDULES)


def test_a_spec_survives_the_wire():
    lr = LRSpec(0.1, "cosine", total_steps=100, warmup_steps=3, final=0.01)
    spec = OptimizerSpec("adamw", lr, weight_decay=0.1, clip_norm=2.0)
    data = msgspec.msgpack.encode(spec)
    assert msgspec.msgpack.decode(data, type=OptimizerSpec) == spec
    assert msgspec.convert(msgspec.to_builtins(spec), OptimizerSpec) == spec


RATES = st.builds(
    lambda kind, base, warm, more, size, gamma, final: LRSpec(
        base, kind, warm + more, warm, size, gamma, final * base
    ),
    st.sampled_from(["constant", "cosine", "step", "linear"]),
    st.floats(1e-6, 10),
    st.integers(0, 20),
    st.integers(1, 50),
    st.integers(1, 20),
    st.floats(0, 1),
    st.floats(0, 1),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(RATES)
def test_a_rate_rises_then_falls_and_stays(spec):
    rates = [learning_rate(spec, step) for step in range(spec.total_steps + 50)]
    rise, fall = rates[: spec.warmup_steps + 1], rates[spec.warmup_steps :]
    assert all(0 < a < b for a, b in itertools.pairwise(rise))
    assert fall[0] == pytest.approx(spec.base)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(fall))
    if spec.kind in ("cosine", "linear"):
        ends = rates[spec.total_steps :]
        assert ends == pytest.approx([spec.final] * len(ends), abs=1e-12)


def test_rates_by_hand():
    def at(spec, *steps):
        return [learning_rate(spec, step) for step in steps]

    assert at(LRSpec(2.0), 0, 10**9) == [2.0, 2.0]
    assert at(LRSpec(3.0, warmup_steps=2), 0, 1, 2, 3) == [1.0, 2.0, 3.0, 3.0]
    step = LRSpec(1.0, "step", step_size=2, gamma=0.5)
    assert at(step, 0, 1, 2, 3, 4) == [1.0, 1.0, 0.5, 0.5, 0.25]
    linear = LRSpec(1.0, "linear", total_steps=6, warmup_steps=2, final=0.2)
    assert at(linear, 2, 4, 6, 7) == pytest.approx([1.0, 0.6, 0.2, 0.2])
    cosine = LRSpec(1.0, "cosine", total_steps=4)
    assert at(cosine, 0, 2, 4) == pytest.approx([1.0, 0.5, 0.0])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 4 * BLOCK))
def test_blocks_cover_a_buffer_once(elements):
    covered = [i for block in blocks(elements) for i in (block.start, block.stop)]
    assert covered[:1] == ([0] if elements else [])
    assert covered[-1:] == ([elements] if elements else [])
    assert covered[1:-1:2] == covered[2::2]
    assert all(0 < b.stop - b.start <= BLOCK for b in blocks(elements))


@pytest.mark.parametrize("elements", [0, 1, BLOCK, 3 * BLOCK + 1])
def test_square_sums_of_parts_add_to_the_whole(elements):
    g = draw(3, elements)
    exact = math.fsum(float(x) ** 2 for x in g)
    assert square_sum(g) == pytest.approx(exact, rel=1e-12)
    cut = elements // 3
    assert square_sum(g[:cut]) + square_sum(g[cut:]) == pytest.approx(exact, rel=1e-12)


def test_square_sum_does_not_overflow_or_drown():
    assert square_sum(np.full(4, 1e30, np.float32)) == pytest.approx(4e60, rel=1e-6)
    g = np.full(1 << 20, 1e-4, np.float32)
    g[0] = 1e4
    assert square_sum(g) - 1e8 == pytest.approx(1e-8 * (1 << 20), rel=1e-3)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_clipping_bounds_the_norm_and_keeps_the_direction(seed, size, clip_norm):
    g = draw(seed, 64) * np.float32(size)
    before = g.copy()
    factor = clip_factor(square_sum(g), clip_norm)
    scale_(g, factor)
    assert math.sqrt(square_sum(g)) <= clip_norm * (1 + 1e-6)
    if math.sqrt(square_sum(before)) < clip_norm - 1e-5:
        np.testing.assert_array_equal(g, before)
    np.testing.assert_allclose(g, before * np.float32(factor), rtol=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_divergence_shows_in_the_weights_and_not_as_a_warning(spec):
    w, optimizer = np.ones(3, np.float32), make(spec, 3)
    for gradient in ([3e38, 0, 1], [3e38, 0, math.inf], [3e38, 0, math.nan]):
        optimizer.step(w, np.array(gradient, np.float32), 10.0)
    assert np.isfinite(w[1])
    assert not np.isfinite(w[2])


def test_clipping_does_not_hide_what_is_not_finite():
    assert math.isnan(clip_factor(math.nan, 1.0))
    assert clip_factor(math.inf, 1.0) == 0.0
    assert clip_factor(0.0, 1.0) == 1.0
    g = np.array([1.0, math.inf], np.float32)
    scale_(g, clip_factor(square_sum(g), 1.0))
    assert np.isnan(g).tolist() == [False, True]
