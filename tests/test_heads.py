"""Heads that learn the model's source task before a run, and nothing else that does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from coordinator.heads import STEPS, Shipment, ship
from coordinator.job import prepare
from edgetrain.bundle import Bundle
from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, PlanConfig, RunConfig
from edgetrain.errors import DataError
from edgetrain.manifest import HEAD, Mode, view
from edgetrain.plan import Plan
from edgetrain.samples import Samples
from edgetrain.sim.fleet import SimDevice
from edgetrain.train_config import TrainConfig
from tests.small_task import blobs, two_layers
from tests.training import NAMES, train


@cache
def bundles(modes: Sequence[Mode], loss: str = "softmax_cross_entropy") -> list[Bundle]:
    program = normalise(two_layers(), batch=16)
    trained = frozenset(program.weights)
    cuts = [CutFinder(program, trained).named("r")]
    return compile_stages(program, cuts, Recipe(trained, loss, tuple(modes)))


def source(samples: int = 300) -> Samples:
    arrays = blobs(samples, seed=3)
    return Samples({"x": arrays["x"]}, arrays["labels"], "source.npz")


def shipped(mode: Mode, samples: Samples | None, seed: int = 0) -> Shipment:
    return ship(bundles((mode, Mode.VJP)), samples, seed)


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.LOCAL_VJP])
def test_only_the_head_learns_and_it_learns_the_source(mode):
    before = bundles((mode, Mode.VJP))
    found, (remark,) = shipped(mode, source())
    assert found[1] is before[1]
    assert found[0].manifest == before[0].manifest
    for spec in found[0].manifest.weights:
        old, new = (view(b.weights, spec) for b in (before[0], found[0]))
        assert np.array_equal(old, new) == (not spec.name.startswith(HEAD)), spec.name
    assert remark.startswith("Stage 0: the heads were trained")
    assert f"{STEPS} steps on 300 samples of source.npz" in remark
    score = float(remark.rpartition(": ")[2].removesuffix("%."))
    assert score > 97


def test_the_same_samples_and_seed_give_the_same_head():
    one, same, other = (shipped(Mode.LOCAL, source(), seed) for seed in (1, 1, 2))
    assert one.bundles[0].encode() == same.bundles[0].encode()
    assert one.bundles[0].encode() != other.bundles[0].encode()


@pytest.mark.parametrize("samples", [16, 17, 40])
def test_a_few_samples_are_enough(samples):
    assert shipped(Mode.LOCAL, source(samples)).remarks


def test_without_samples_heads_stay_as_drawn_and_the_run_says_so():
    found, (remark,) = shipped(Mode.LOCAL, None)
    assert found == bundles((Mode.LOCAL, Mode.VJP))
    assert "give [model] source" in remark
    assert shipped(Mode.LOCAL_VJP, None).remarks == ()
    for mode in (Mode.VJP, Mode.HYBRID, Mode.FROZEN):
        assert shipped(mode, source()) == (bundles((mode, Mode.VJP)), ())


def test_heads_of_a_regression_are_judged_by_their_loss():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 4)).astype(np.float32)
    samples = Samples({"x": x}, x[:, :3].copy(), "source.npz")
    _, (remark,) = ship(bundles((Mode.LOCAL, Mode.VJP), "mse"), samples, 0)
    assert "mean losses" in remark
    assert float(remark.rpartition(": ")[2].removesuffix(".")) < 0.2


def run_of(folder: Path) -> RunConfig:
    onnx.save(two_layers(), folder / "m.onnx")
    for name, samples in (("train", 64), ("source", 200)):
        np.savez(folder / f"{name}.npz", **blobs(samples))
    return RunConfig(
        ModelConfig(folder / "m.onnx", source=folder / "source.npz"),
        DataConfig(folder / "train.npz"),
        TrainConfig(steps=2, batch_size=32, gradient=("local", "vjp")),
        PlanConfig(cuts=("r",)),
        FleetConfig(devices=NAMES[:2]),
    )


def test_a_run_trains_its_heads_first_and_tells_plan_and_user(tmp_path):
    outcome = train(run_of(tmp_path), tmp_path / "run", map(SimDevice, NAMES[:2]))
    plan = Plan.decode((tmp_path / "run" / "plan.json").read_bytes())
    (remark,) = [text for text in plan.remarks if "heads" in text]
    assert "200 samples" in remark
    assert remark in outcome.remarks
    assert len(set(outcome.remarks)) == len(outcome.remarks)


def test_a_source_that_does_not_fit_is_refused_before_any_device_is_asked(tmp_path):
    config = run_of(tmp_path)
    np.savez(tmp_path / "source.npz", x=blobs(32)["x"])
    with pytest.raises(DataError, match=r"source\.npz has no labels"):
        prepare(config)
    model = msgspec.structs.replace(config.model, source=tmp_path / "nowhere.npz")
    with pytest.raises(DataError, match=r"nowhere\.npz"):
        prepare(msgspec.structs.replace(config, model=model))
