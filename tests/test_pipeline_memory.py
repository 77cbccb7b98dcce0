"""Real agents over the in-memory hub: however many devices, the weights are the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

from coordinator.job import prepare
from coordinator.progress import SilentProgress
from coordinator.session import Session
from coordinator.watch import Watch
from edgetrain.compiler.normalise import normalise
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, PlanConfig, RunConfig
from edgetrain.errors import DivergedError, PlanError
from edgetrain.sim.fleet import SimDevice, ThreadFleet
from edgetrain.train_config import TrainConfig
from edgetrain.transport.memory import MemoryHub, MemoryTransport
from edgetrain.wire.topics import COORDINATOR
from tests.cut_models import MODELS, samples

NAMES = ("one", "two", "three", "four")
BATCH = 16
STEPS = 3
Weights = dict[str, np.ndarray]


class Runs:
    """Trains models of `cut_models`; equal runs are made once."""

    def __init__(self, hub: MemoryHub, folder: Path) -> None:
        self._hub = hub
        self._folder = folder
        self._numbers = itertools.count()

    @cache  # noqa: B019 - it lives as long as its module's tests
    def __call__(
        self, name: str, stages: int, *, trainable: str = "all", **options
    ) -> Weights:
        """The weights it ends with on so many devices."""
        session, folder = self.session(name, stages, trainable, **options)
        outcome = session.train(folder / "out")
        assert outcome.steps == STEPS
        return weights(outcome.model)

    def session(
        self,
        name: str,
        stages: int,
        trainable: str = "all",
        cuts: tuple[str, ...] = (),
        **options,
    ) -> tuple[Session, Path]:
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        onnx.save(MODELS[name](), folder / "model.onnx")
        np.savez(folder / "data.npz", **samples(name, batch=2 * BATCH))
        plain = {"steps": STEPS, "batch_size": BATCH, "shuffle": False, "momentum": 0.5}
        config = RunConfig(
            ModelConfig(folder / "model.onnx", trainable=trainable),
            DataConfig(folder / "data.npz"),
            TrainConfig(**(plain | {"lr": 0.05} | options)),
            PlanConfig(cuts=cuts, stages="auto" if cuts else "all"),
            FleetConfig(devices=NAMES[:stages], step_timeout_s=20.0),
        )
        transport = MemoryTransport(self._hub, COORDINATOR)
        return Session(prepare(config), transport, Watch(SilentProgress())), folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Four agents that stay up for all the runs."""
    hub = MemoryHub()
    devices = [SimDevice(name, memory_bytes=1 << 30) for name in NAMES]
    with ThreadFleet(lambda name: MemoryTransport(hub, name), devices):
        yield Runs(hub, tmp_path_factory.mktemp("runs"))


def weights(model: Path) -> Weights:
    return dict(normalise(onnx.load(model), batch=1).weights)


def assert_identical(found: Weights, expected: Weights) -> None:
    different = [n for n, value in expected.items() if not np.array_equal(found[n], value)]
    assert not different


def moved(name: str, found: Weights) -> set[str]:
    start = normalise(MODELS[name](), batch=1).weights
    return {n for n, value in start.items() if not np.array_equal(found[n], value)}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-eager"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["encoder", "residual"])
def test_devices_and_schedule_change_no_bit(run, name, stages, schedule):
    """With attention, and with BatchNormalization and its running statistics."""
    expected = run(name, 1, schedule="1f1b")
    found = run(name, stages, schedule=schedule)
    assert_identical(found, expected)
    assert moved(name, found) == set(found)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam", "lr": 0.01},
        {"nesterov": True, "weight_decay": 0.01},
        {"clip_norm": 0.1},
    ],
    ids=str,
)
def test_the_optimizer_does_not_see_the_cut(run, options):
    expected = run("chain", 1, **options)
    assert_identical(run("chain", 3, **options), expected)
    assert moved("chain", expected) == set(expected)


def test_clipping_clips(run):
    """Else the test above would hold without it."""
    start = normalise(MODELS["chain"](), batch=1).weights
    free, clipped = (
        sum(np.square(found[n] - value).sum() for n, value in start.items())
        for found in (run("chain", 1), run("chain", 1, clip_norm=0.1))
    )
    assert clipped < 0.25 * free


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_microbatches_change_nothing_but_rounding(run, microbatches):
    """With one stage or three: bit for bit between these."""
    one = run("deep", 1, microbatches=microbatches)
    assert_identical(run("deep", 3, microbatches=microbatches), one)
    for name, value in run("deep", 1, microbatches=4).items():
        np.testing.assert_allclose(one[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_hybrid_stage_repeats_to_the_bit(run, position):
    """Under any schedule: the noise belongs to the step and the microbatch."""
    gradient = tuple("hybrid" if s == position else "vjp" for s in range(3))
    options = {"gradient": gradient, "cuts": ("t1", "t3")}
    found = run("deep", 3, schedule="1f1b", **options)
    assert_identical(run("deep", 3, schedule="gpipe", **options), found)
    assert moved("deep", found) == set(found)
    other = run("deep", 3, schedule="1f1b", seed=1, **options)
    assert any(not np.array_equal(other[n], value) for n, value in found.items())


def test_a_frozen_stage_keeps_its_weights_and_trains_the_others(run):
    gradient = ("vjp", "frozen", "vjp")
    found = run("deep", 3, gradient=gradient, cuts=("t1", "t3"))
    assert set(found) - moved("deep", found) == {"w2", "b2", "w3", "b3"}


@pytest.mark.parametrize("name", ["deep", "residual"])
def test_training_the_last_layer_alone_is_the_same_on_three_devices(run, name):
    """No cotangent travels, and the first stages may run ahead."""
    expected = run(name, 1, trainable="last:1")
    assert_identical(run(name, 3, trainable="last:1"), expected)
    last = {"w5", "b5"} if name == "deep" else {"w", "b"}
    assert {n for n in moved(name, expected) if "." not in n} == last


@pytest.mark.parametrize("trainable", ["all", "last:1"])
def test_a_run_that_diverges_ends_and_keeps_finite_weights(run, trainable):
    """Also where the first stages have run ahead of the step that failed."""
    session, folder = run.session("residual", 3, trainable, lr=3e38, steps=12)
    with pytest.raises(DivergedError):
        session.train(folder / "out")
    found = weights(folder / "out" / "trained.onnx")
    assert all(np.isfinite(value).all() for value in found.values())


def test_more_stages_than_places_to_cut_are_refused(run):
    session, folder = run.session("late_input", 4)
    with pytest.raises(PlanError, match="only 2 valid cuts"):
        session.train(folder / "out")
