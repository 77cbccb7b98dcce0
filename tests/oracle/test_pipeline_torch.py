"""A pipeline over MQTT ends with the weights that PyTorch's own training ends with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from coordinator.job import prepare
from coordinator.progress import SilentProgress
from coordinator.session import Session
from coordinator.watch import Watch
from device_agent.agent import Agent, Equipment
from edgetrain.compiler.normalise import normalise
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, RunConfig
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.train_config import TrainConfig
from edgetrain.transport.broker import Broker, embedded_broker
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.hello import Hello
from tests.oracle import pipeline_models as models

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle

BATCH = 16
MICROBATCHES = 4
NAMES = ("one", "two", "three", "four")


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """A broker with four agents that stay up for all the runs."""
    with embedded_broker() as broker:
        agents = []
        for name in NAMES:
            hello = Hello(name, name, "0", "onnxruntime", (), "auto", 1 << 30, 1e9, 1)
            agent = Agent(
                MqttTransport(broker.url, name), Equipment(hello, OnnxRuntimeEngine())
            )
            thread = threading.Thread(target=agent.run, daemon=True)
            thread.start()
            agents.append((agent, thread))
        yield broker
        for agent, thread in agents:
            agent.stop()
            thread.join(timeout=10)


def by_torch(name: str, model, train: TrainConfig, steps: int) -> None:
    """Train in place on the run's batches, a microbatch at a time."""
    x, labels = models.samples(name, BATCH * 4)
    model.train()
    if train.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            model.parameters(),
            train.lr,
            momentum=train.momentum,
            nesterov=train.nesterov,
            weight_decay=train.weight_decay,
        )
    else:
        optimizer = torch.optim.Adam(model.parameters(), train.lr)
    size = BATCH // MICROBATCHES
    for step in range(steps):
        optimizer.zero_grad()
        for m in range(MICROBATCHES):
            start = step % 4 * BATCH + m * size
            part = slice(start, start + size)
            output = model(torch.from_numpy(x[part]))
            loss = torch.nn.functional.cross_entropy(output, torch.from_numpy(labels[part]))
            (loss / MICROBATCHES).backward()
        optimizer.step()


def by_pipeline(
    path: Path, broker: Broker, train: TrainConfig, stages: int, out: Path
) -> dict[str, np.ndarray]:
    config = RunConfig(
        ModelConfig(path),
        DataConfig(path.with_name("data.npz")),
        train,
        fleet=FleetConfig(devices=NAMES[:stages], broker=broker.url),
    )
    transport = MqttTransport(broker.url, "coordinator")
    outcome = Session(prepare(config), transport, Watch(SilentProgress())).train(out)
    trained = onnx.load(outcome.model)
    return dict(normalise(trained, batch=1).weights)


@dataclass(frozen=True)
class Setting:
    """What is compared: a model, in how many stages, as which exporter writes it."""

    name: str
    stages: int
    dynamo: bool


def compare(
    setting: Setting, folder: Path, broker: Broker, train: TrainConfig
) -> tuple[float, str]:
    name = setting.name
    model = models.make(name)
    path = folder / "model.onnx"
    models.export(name, model, path, dynamo=setting.dynamo)
    x, labels = models.samples(name, BATCH * 4)
    np.savez(folder / "data.npz", x=x, labels=labels)
    pairs = models.pair(models.state(model), normalise(onnx.load(path), batch=1).weights)
    by_torch(name, model, train, train.steps)
    weights = by_pipeline(path, broker, train, setting.stages, folder / "run")
    return models.largest_difference(models.state(model), weights, pairs)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-eager"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["lenet", "mlp", "encoder"])
def test_sgd_with_momentum_equals_torch(
    name: str, stages: int, schedule: str, broker: Broker, tmp_path: Path
) -> None:
    train = TrainConfig(
        steps=50,
        batch_size=BATCH,
        microbatches=MICROBATCHES,
        lr=0.01,
        momentum=0.9,
        schedule=schedule,
        shuffle=False,
    )
    dynamo = (stages + len(schedule)) % 2 == 0  # both exporters, each in half of the cases
    worst, tensor = compare(Setting(name, stages, dynamo), tmp_path, broker, train)
    assert worst < 1e-5, tensor


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("name", ["lenet", "mlp", "encoder"])
def test_adam_equals_torch(name: str, stages: int, broker: Broker, tmp_path: Path) -> None:
    train = TrainConfig(
        steps=50,
        batch_size=BATCH,
        microbatches=MICROBATCHES,
        optimizer="adam",
        lr=1e-3,
        shuffle=False,
    )
    worst, tensor = compare(Setting(name, stages, stages == 1), tmp_path, broker, train)
    assert worst < 1e-4, tensor


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", ["residual", "inverted"])
def test_batch_norm_equals_torch_step_by_step(
    name: str, stages: int, broker: Broker, tmp_path: Path
) -> None:
    """Kinks amplify rounding over many steps, so these nets are compared after each few."""
    for steps in (1, 2, 4):
        folder = tmp_path / str(steps)
        folder.mkdir()
        train = TrainConfig(
            steps=steps,
            batch_size=BATCH,
            microbatches=MICROBATCHES,
            lr=0.02,
            momentum=0.9,
            shuffle=False,
        )
        worst, tensor = compare(Setting(name, stages, False), folder, broker, train)
        assert worst < 1e-5, f"{tensor} after {steps}"
