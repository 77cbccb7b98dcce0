"""Whole runs whose stages learn from heads of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from lenet import lenet, write_mnist
from small_task import blobs, determinant, two_layers
from training import NAMES, Wire, metrics, on_three, same_weights, three, train, weights_of

from coordinator.session import Outcome
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, PlanConfig, RunConfig
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.manifest import HEAD
from edgetrain.sim.fleet import SimDevice
from edgetrain.train_config import TrainConfig
from edgetrain.wire.frame import Kind

TRAIN = TrainConfig(
    epochs=2,
    batch_size=80,
    microbatches=2,
    optimizer="adam",
    lr=0.003,
    lr_schedule="cosine",
    warmup_steps=25,
)
CUTS = ("flat", "relu3")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("local")
    data = write_mnist(folder)
    onnx.save(lenet(), folder / "lenet.onnx")
    return RunConfig(ModelConfig(folder / "lenet.onnx"), DataConfig(*data), TRAIN)


def run(config: RunConfig, gradient: Sequence[str], out: Path) -> Outcome:
    return train(on_three(config, CUTS), out, three(gradient))


@pytest.fixture(scope="module")
def frozen(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Accuracy where the first stage, with both convolutions, stays as drawn."""
    out = tmp_path_factory.mktemp("frozen") / "run"
    return run(config, ("frozen", "auto", "auto"), out).score.accuracy


@pytest.mark.parametrize("mode", ["local_vjp", "local"])
def test_a_stage_with_a_head_learns_more_than_a_frozen_one(
    mode: str, config: RunConfig, frozen: float, tmp_path: Path
) -> None:
    outcome = run(config, (mode, "auto", "auto"), tmp_path / "run")
    print(f"{mode}: {outcome.score.accuracy} (frozen: {frozen})")  # noqa: T201 - pytest -s
    assert outcome.score.accuracy >= max(0.91, frozen + 0.015)
    weights = weights_of(outcome.model)
    assert not any(name.startswith(HEAD) for name in weights)
    start = weights_of(config.model.path)
    assert weights.keys() == start.keys()
    assert not any(np.array_equal(weights[name], start[name]) for name in weights)


def small(folder: Path, **settings: object) -> RunConfig:
    """A few steps of a small net with stages on two devices."""
    onnx.save(two_layers(), folder / "m.onnx")
    np.savez(folder / "train.npz", **blobs(96))
    np.savez(folder / "eval.npz", **blobs(48, seed=1))
    config = RunConfig(
        ModelConfig(folder / "m.onnx"),
        DataConfig(folder / "train.npz", folder / "eval.npz"),
        TrainConfig(epochs=6, batch_size=32, optimizer="adam", lr=0.03),
        PlanConfig(cuts=("r",)),
        FleetConfig(devices=NAMES[:2]),
    )
    return msgspec.structs.replace(config, **settings)


def two(gradient: str, files: tuple[Path, Path] | None = None) -> list[SimDevice]:
    datasets = {"blobs": files} if files else {}
    return [
        SimDevice(NAMES[0], gradient=gradient, datasets=datasets),
        SimDevice(NAMES[1], gradient=gradient),
    ]


@pytest.mark.parametrize("mode", ["local_vjp", "local"])
def test_a_run_of_one_seed_ends_with_the_same_bits(mode: str, tmp_path: Path) -> None:
    """The seed draws the heads; nothing depends on who was faster."""
    config = small(tmp_path)
    other = msgspec.structs.replace(config.train, seed=5)
    seeds = (config.train, config.train, other)
    for number, settings in enumerate(seeds):
        chosen = msgspec.structs.replace(config, train=settings)
        outcome = train(chosen, tmp_path / str(number), two(mode))
        assert outcome.score.accuracy > 0.9
    assert same_weights(tmp_path / "0", tmp_path / "1")
    assert not same_weights(tmp_path / "0", tmp_path / "2")


@pytest.mark.parametrize("mode", ["local_vjp", "local"])
def test_data_that_stay_on_a_device_teach_every_head(mode: str, tmp_path: Path) -> None:
    """The first device keeps the samples and sends labels to the last stage alone."""
    config = small(tmp_path)
    files = (tmp_path / "train.npz", tmp_path / "eval.npz")
    here = train(config, tmp_path / "here", two(mode))
    wire = Wire()
    data = DataConfig(device=NAMES[0], dataset="blobs")
    config = msgspec.structs.replace(config, data=data)
    there = train(config, tmp_path / "there", two(mode, files), wire=wire)
    assert same_weights(here.model.parent, there.model.parent)
    kinds = {(s.to, s.frame.address.kind) for s in wire.data()}
    assert (NAMES[1], Kind.LABELS) in kinds
    assert not any(kind is Kind.COTANGENT for _, kind in kinds)
    losses = [[x["loss"] for x in metrics(o.folder) if "loss" in x] for o in (here, there)]
    assert losses[0] == losses[1]


def test_the_whole_gradient_s_norm_counts_the_heads(tmp_path: Path) -> None:
    """Clipping works where stages do not hear of each other."""
    settings = TrainConfig(epochs=2, batch_size=32, clip_norm=0.5, lr=0.1)
    outcome = train(small(tmp_path, train=settings), tmp_path / "run", two("local"))
    assert outcome.steps == 6


@pytest.mark.parametrize("mode", ["local_vjp", "local"])
def test_a_stage_before_an_op_without_a_rule_learns(mode: str, tmp_path: Path) -> None:
    """No gradient passes a determinant; none has to."""
    config = small(tmp_path)
    onnx.save(determinant(), tmp_path / "m.onnx")
    plan = PlanConfig(cuts=("h",))
    settings = TrainConfig(epochs=2, batch_size=32, gradient=(mode, "vjp"))
    config = msgspec.structs.replace(config, plan=plan, train=settings)
    outcome = train(config, tmp_path / "run", two("auto"))
    before, after = (weights_of(p) for p in (config.model.path, outcome.model))
    assert not np.array_equal(before["w1"], after["w1"])


@pytest.fixture(scope="module")
def turned(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A net that knows upright digits is to learn 1,000 that lie on their side."""
    folder = tmp_path_factory.mktemp("turned")
    known = run(config, ("auto",) * 3, folder / "known").model
    rows = np.random.default_rng(0).permutation(4000)[:1000]
    for name, path in (("train", config.data.train), ("eval", config.data.eval)):
        with np.load(path) as arrays:
            kept = rows if name == "train" else slice(None)
            x = np.rot90(arrays["x"][kept], axes=(2, 3))
            np.savez(folder / f"{name}.npz", x=x, labels=arrays["labels"][kept])
    return RunConfig(
        ModelConfig(known),
        DataConfig(folder / "train.npz", folder / "eval.npz"),
        TrainConfig(steps=60, batch_size=32, microbatches=1, optimizer="adam", lr=0.003),
        PlanConfig(cuts=("relu4",)),
        FleetConfig(devices=NAMES[:2]),
        EstimatorSpec(tangents=4),
    )


def test_heads_that_know_the_source_teach_a_deep_stage_sooner(
    config: RunConfig, turned: RunConfig, tmp_path: Path
) -> None:
    """Four of the five layers are before the head; 60 steps are little without it."""
    known = msgspec.structs.replace(turned.model, source=config.data.train)
    found = {}
    for name, mode, model in (
        ("frozen", "frozen", turned.model),
        ("drawn", "local_vjp", turned.model),
        ("shipped", "local_vjp", known),
        ("without backprop", "local", known),
    ):
        settings = msgspec.structs.replace(turned.train, gradient=(mode, "vjp"))
        full = msgspec.structs.replace(turned, model=model, train=settings)
        outcome = train(full, tmp_path / name, two("auto"))
        found[name] = outcome.score.accuracy
    print(found)  # noqa: T201 - pytest -s
    assert found["drawn"] > found["frozen"] + 0.2
    assert found["shipped"] > found["drawn"] + 0.01
    assert found["without backprop"] > found["frozen"] + 0.1
