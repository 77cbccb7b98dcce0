"""LeNet learns 4,000 real digits on three agents, with and without backprop everywhere."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from lenet import lenet, write_mnist
from training import metrics, on_three, three, train

from edgetrain.config import DataConfig, ModelConfig, RunConfig
from edgetrain.plan import Plan
from edgetrain.train_config import TrainConfig

EXACT = TrainConfig(
    epochs=8,
    batch_size=50,
    microbatches=2,
    lr=0.05,
    weight_decay=1e-3,
    lr_schedule="cosine",
    warmup_steps=80,
)
ESTIMATED = TrainConfig(
    epochs=5,
    batch_size=80,
    microbatches=2,
    optimizer="adam",
    lr=0.005,
    lr_schedule="cosine",
    warmup_steps=25,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("mnist")
    data = write_mnist(folder)
    onnx.save(lenet(), folder / "lenet.onnx")
    return RunConfig(ModelConfig(folder / "lenet.onnx"), DataConfig(*data))


def accuracy(
    config: RunConfig,
    train_config: TrainConfig,
    cuts: tuple[str, str],
    gradient: tuple[str, str, str],
    out: Path,
) -> float:
    """Held-out accuracy at the end; the figures of all epochs are printed."""
    full = RunConfig(config.model, config.data, train_config)
    outcome = train(on_three(full, cuts), out, three(gradient))
    plan = Plan.decode((out / "plan.json").read_bytes())
    modes = [stage.mode for stage in plan.stages]
    assert modes == ["vjp" if word == "auto" else word for word in gradient]
    assert not outcome.interrupted
    assert outcome.score is not None
    assert outcome.score.samples == 1000
    epochs = [line["eval_accuracy"] for line in metrics(out) if "eval_accuracy" in line]
    print(f"{'/'.join(modes)}: {epochs}")  # noqa: T201 - shown with pytest -s
    return outcome.score.accuracy


def test_exact_gradients(config: RunConfig, tmp_path: Path) -> None:
    cuts = ("pool1", "flat")
    assert accuracy(config, EXACT, cuts, ("auto",) * 3, tmp_path / "run") >= 0.96


def test_the_first_stage_only_infers(config: RunConfig, tmp_path: Path) -> None:
    """It holds both convolutions: the second's gradient is exact, the first's estimated."""
    cuts, gradient = ("flat", "relu3"), ("hybrid", "auto", "auto")
    assert accuracy(config, ESTIMATED, cuts, gradient, tmp_path / "run") >= 0.95


def test_the_middle_stage_only_infers(config: RunConfig, tmp_path: Path) -> None:
    """The first stage then learns from an estimated cotangent."""
    cuts, gradient = ("pool1", "relu3"), ("auto", "hybrid", "auto")
    assert accuracy(config, ESTIMATED, cuts, gradient, tmp_path / "run") >= 0.92
