"""More tangents where estimates are noise, fewer where they are signal."""

from __future__ import annotations

from pathlib import Path

import pytest
from free_runs import run_config
from free_tasks import digits_mlp
from training import same_weights, train

from edgetrain.errors import ConfigError
from edgetrain.estimator_spec import MOST_ADAPTED, EstimatorSpec
from edgetrain.manifest import Mode
from edgetrain.runtime.estimators.hybrid import CLEAR, EVERY, NOISE, Hybrid
from edgetrain.runtime.parameters import Parameters
from edgetrain.sim.fleet import SimDevice
from tests.stage_runs import ENGINE, compiled, finder

LAST = EVERY - 1


def hybrid(spec: EstimatorSpec) -> Hybrid:
    cut = finder("deep").named("t3")
    bundle = compiled("deep", [cut], modes=[Mode.HYBRID, Mode.VJP], estimator=spec)[0]
    return Hybrid(bundle, ENGINE, Parameters(bundle), 0)


@pytest.mark.parametrize("noise", ["activations", "weights"])
def test_tangents_follow_the_signal(noise):
    found = hybrid(EstimatorSpec(4, adaptive=True, noise=noise))
    for signal, expected in (
        (NOISE / 2, 8),
        (NOISE / 2, 16),
        (-0.1, MOST_ADAPTED),
        ((NOISE + CLEAR) / 2, 16),
        (2 * CLEAR, 8),
        (2 * CLEAR, 4),
        (2 * CLEAR, 2),
        (2 * CLEAR, 1),
        (2 * CLEAR, 1),
    ):
        found.heed(signal, LAST)
        assert found.tangents == expected
    found.forget()
    assert found.tangents == 4


@pytest.mark.parametrize(("signal", "step"), [(0.0, LAST), (2 * CLEAR, LAST - 1)])
def test_nothing_known_and_the_steps_between_change_nothing(signal, step):
    found = hybrid(EstimatorSpec(4, adaptive=True))
    found.heed(signal, step)
    assert found.tangents == 4


def test_as_many_as_asked_for_stay_as_many():
    found = hybrid(EstimatorSpec(4))
    found.heed(2 * CLEAR, LAST)
    assert found.tangents == 4


def test_the_forecast_counts_as_many_as_there_may_come_to_be():
    assert EstimatorSpec(4, adaptive=True).most_tangents == MOST_ADAPTED
    assert EstimatorSpec(32, adaptive=True).most_tangents == 32
    assert EstimatorSpec(4).most_tangents == 4
    with pytest.raises(ConfigError, match="tangents = 0"):
        EstimatorSpec(0)


def test_a_run_repeats_to_the_bit_and_is_not_that_of_fixed_tangents(tmp_path: Path):
    task = digits_mlp(2 * EVERY + 10)
    runs = {"one": True, "same": True, "fixed": False}
    for name, adaptive in runs.items():
        folder = tmp_path / name
        folder.mkdir()
        spec = EstimatorSpec(2, adaptive=adaptive)
        config = run_config(
            task, folder, task.cuts["last"], spec, gradient=("hybrid", "vjp")
        )
        train(config, folder / "run", [SimDevice("a"), SimDevice("b")])
    assert same_weights(tmp_path / "one/run", tmp_path / "same/run")
    assert not same_weights(tmp_path / "one/run", tmp_path / "fixed/run")
