"""The latency model: exact where the world is linear, sensible where it is not."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.device_profile import Case
from edgetrain.errors import ConfigError
from edgetrain.op_groups import Amount, LayerFeatures, OpGroup, update_amount
from edgetrain.planner import latency_model
from edgetrain.planner.latency_model import KEPT, MEASURED, PRIOR, LatencyModel
from edgetrain.planner.rates import Rate, fit, guessed
from tests.device_profiles import RATES, RUN_S, SHAPES, profile, seconds

GROUPS = tuple(group for group in OpGroup if group is not OpGroup.OPTIMIZER)
AMOUNTS = st.builds(
    Amount,
    flop=st.floats(0, 1e12),
    nbytes=st.floats(0, 1e10),
    nodes=st.floats(0, 1e4),
)
BY_GROUP = st.dictionaries(st.sampled_from(GROUPS), AMOUNTS, max_size=4)
FEATURES = st.builds(LayerFeatures, BY_GROUP, BY_GROUP, st.integers(0, 10**9))


def drawn(seed: int) -> LayerFeatures:
    """A stage of a few groups, as models have them."""
    generator = np.random.default_rng(seed)
    chosen = generator.choice(len(GROUPS), 4, replace=False)
    amounts = {
        GROUPS[n]: Amount(*map(float, generator.uniform(0.1, 1, 3) * (1e8, 1e7, 10)))
        for n in chosen
    }
    return LayerFeatures(amounts, amounts, 1000)


def true_s(features: LayerFeatures, factors=None, direction: float = 1.0) -> float:
    """Of a device of `RATES`, each group off by a factor."""
    factors = factors or {}
    return RUN_S + direction * sum(
        factors.get(group, 1.0) * seconds(amount, RATES[group])
        for group, amount in features.forward.items()
    )


def test_a_linear_device_is_predicted_exactly():
    model = LatencyModel.of(profile())
    for seed in range(10):
        features = drawn(seed)
        assert model.forward_s(features) == pytest.approx(true_s(features), rel=1e-3)
        back = true_s(features, direction=2)
        assert model.backward_s(features) == pytest.approx(back, rel=1e-3)
        assert model.fused_s(features) == pytest.approx(
            model.forward_s(features) + model.backward_s(features) - RUN_S
        )


def test_an_update_is_predicted_exactly():
    model = LatencyModel.of(profile())
    features = LayerFeatures(trainable_elements=10**6)
    expected = seconds(update_amount("adam", 10**6), RATES[OpGroup.OPTIMIZER])
    assert model.update_s(features, "adam") == pytest.approx(expected, rel=1e-3)
    with pytest.raises(ConfigError, match="'lion'"):
        model.update_s(features, "lion")


def test_learning_is_ridge_regression():
    """Row after row gives what all rows at once give, older ones of less weight."""
    start = LatencyModel.of(profile())
    model, rows, targets = start, [], []
    for seed in range(8):
        features = drawn(seed)
        for row, s in ((start._forward(features), 2e-2), (start._backward(features), 3e-2)):
            rows.append(row / row.sum() / MEASURED)
            targets.append(s / row.sum() / MEASURED)
        model = model.learn(features, 2e-2, 3e-2)
    ages = np.arange(len(rows))[::-1]
    x = np.array(rows) * np.sqrt(KEPT**ages)[:, None]
    y = np.array(targets) * np.sqrt(KEPT**ages)
    ones = np.ones(len(PRIOR))
    expected = np.linalg.solve(PRIOR + x.T @ x, PRIOR @ ones + x.T @ y)
    found = np.linalg.solve(model.precision, model.weighted)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert model.measurements == 16


def test_one_stage_tells_of_a_device_that_is_slower_in_all():
    model = LatencyModel.of(profile())
    shown, other = drawn(1), drawn(2)
    assert not shown.forward.keys() >= other.forward.keys()
    learnt = model.learn(shown, 4 * true_s(shown), 4 * true_s(shown, direction=2))
    assert learnt.forward_s(other) == pytest.approx(4 * true_s(other), rel=0.1)
    assert learnt.backward_s(other) == pytest.approx(
        4 * true_s(other, direction=2), rel=0.1
    )
    assert learnt.update_s(other, "sgd") == pytest.approx(
        4 * model.update_s(other, "sgd"), rel=0.15
    )


def test_stages_teach_the_groups_apart():
    """The error on stages never seen falls as others are measured."""
    factors = {group: 0.6 + 0.15 * n for n, group in enumerate(OpGroup)}
    unseen = [drawn(seed) for seed in range(100, 110)]

    def error(model: LatencyModel) -> float:
        wrong = [model.forward_s(f) / true_s(f, factors) - 1 for f in unseen]
        return float(np.mean(np.abs(wrong)))

    model = LatencyModel.of(profile())
    errors = [error(model)]
    for count in (2, 6, 30):
        for seed in range(count):
            features = drawn(seed)
            model = model.learn(features, true_s(features, factors), 0.0)
        errors.append(error(model))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 * errors[0]


def test_a_device_that_changes_is_followed():
    model = LatencyModel.of(profile())
    features = drawn(3)
    for _ in range(100):
        model = model.learn(features, true_s(features), 0.0)
    for _ in range(100):
        model = model.learn(features, 4 * true_s(features), 0.0)
    assert model.forward_s(features) == pytest.approx(4 * true_s(features), rel=0.1)


def test_a_fused_stage_teaches_the_sum():
    model = LatencyModel.of(profile())
    features = drawn(4)
    learnt = model.learn(features, 0.0, 3 * model.fused_s(features), fused=True)
    assert learnt.measurements == 1
    assert learnt.fused_s(features) == pytest.approx(3 * model.fused_s(features), rel=0.02)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(FEATURES, st.floats(0, 1e6), st.floats(0, 1e6), st.booleans()), max_size=6
    ),
    FEATURES,
    st.sampled_from([LatencyModel.of(profile()), LatencyModel.of_speed(1e9)]),
)
def test_predictions_are_never_negative_or_not_a_number(measured, features, model):
    for shown, forward_s, backward_s, fused in measured:
        model = model.learn(shown, forward_s, backward_s, fused=fused)
    for predicted in (
        model.forward_s(features),
        model.backward_s(features),
        model.fused_s(features),
        model.update_s(features, "adam"),
    ):
        assert math.isfinite(predicted)
        assert predicted >= 0
    assert LatencyModel.decode(model.encode()).forward_s(features) == pytest.approx(
        model.forward_s(features), rel=1e-6
    )


def test_more_work_never_takes_less():
    model = LatencyModel.of(profile())
    for seed in range(20):
        model = model.learn(drawn(seed), 1e-4 * (seed + 1), 1e-2 / (seed + 1))
    features = drawn(50)
    assert model.forward_s(features + drawn(51)) >= model.forward_s(features)


def test_what_runs_nothing_backward_takes_no_time():
    model = LatencyModel.of(profile())
    features = LayerFeatures({OpGroup.DENSE: Amount(1e6, 1e5, 1)})
    assert model.backward_s(features) == 0
    assert model.forward_s(features) > 0
    assert model.learn(features, 0.0, 1.0) is model


def test_an_unmeasured_group_costs_as_the_others():
    whole = profile()
    kept = tuple(c for c in whole.cases if c.group != OpGroup.RECURRENT)
    strange = Case("attention", "attention", 1, 1e6, 1e6, 1, 1e-3, 1e-3)
    model = LatencyModel.of(msgspec.structs.replace(whole, cases=(*kept, strange)))
    features = LayerFeatures({OpGroup.RECURRENT: Amount(1e8, 1e6, 4)})
    others = [
        model.forward_s(LayerFeatures({group: Amount(1e8, 1e6, 4)})) for group in GROUPS
    ]
    assert min(others) <= model.forward_s(features) <= max(others)


def test_a_device_without_a_profile_is_predicted_by_its_speed():
    fast, slow = LatencyModel.of_speed(2e10), LatencyModel.of_speed(1e9)
    features = drawn(5)
    assert slow.forward_s(features) == pytest.approx(20 * fast.forward_s(features))
    assert slow.backward_s(features) > slow.forward_s(features)
    for speed in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="flop_per_s"):
            LatencyModel.of_speed(speed)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, 1e9])
def test_a_time_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match="forward_s"):
        LatencyModel.of_speed(1e9).learn(drawn(1), wrong, 1.0)
    with pytest.raises(ConfigError, match="backward_s"):
        LatencyModel.of_speed(1e9).learn(drawn(1), 1.0, wrong)


def test_a_damaged_model_is_refused():
    model = LatencyModel.of_speed(1e9).learn(drawn(1), 1e-3, 2e-3)
    good = msgspec.json.decode(model.encode())
    size = len(PRIOR)
    for key, value in (
        ("format", 2),
        ("weighted", [0.0]),
        ("precision", [[0.0] * size] * size),
        ("precision", np.diag([1e400] * size).tolist()),
        ("precision", [[1.0]]),
        ("rates", None),
    ):
        with pytest.raises(ConfigError, match="not a latency model"):
            LatencyModel.decode(msgspec.json.encode({**good, key: value}))
    for data in (b"", b"{}", b"[" * 100_000, b" " * (latency_model.MAX_BYTES + 1)):
        with pytest.raises(ConfigError, match="not a latency model"):
            LatencyModel.decode(data)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.tuples(*[st.floats(0.1, 10)] * 3),
    st.lists(st.tuples(*[st.floats(0.01, 1)] * 3), min_size=4, max_size=10),
)
def test_a_fit_of_a_linear_device_is_exact(true, rows):
    cases = [
        (Amount(*row), sum(t * x for t, x in zip(true, row, strict=True))) for row in rows
    ]
    found = fit(cases)

    def error(rate: Rate) -> float:
        return sum((rate.seconds(amount) / s - 1) ** 2 for amount, s in cases)

    assert error(found) < 1e-6
    assert min(msgspec.structs.astuple(found)) >= 0


def test_a_fit_never_goes_below_zero():
    """Where the plain least squares would."""
    cases = [(Amount(1, 1, 1), 1.0), (Amount(1, 2, 1), 0.5), (Amount(2, 2, 1), 2.0)]
    rate = fit(cases)
    assert min(msgspec.structs.astuple(rate)) >= 0
    assert fit([(Amount(0, 0, 0), 1.0)]) == Rate(0, 0, 0)


def test_a_rate_below_zero_is_refused():
    with pytest.raises(ValueError, match="a rate"):
        Rate(-1.0, 0, 0)
    assert guessed(1e9).forward.other.flop_s == 1e-9


def test_shapes_tell_the_three_rates_apart():
    """Else the first test would not test the fit."""
    rows = np.array([msgspec.structs.astuple(shape) for shape in SHAPES])
    assert np.linalg.matrix_rank(rows / rows.max(0)) == 3
