"""Runs that end early keep the weights they should, and say what happened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from small_models import build, normal
from training import (
    IN_ORDER,
    NAMES,
    OnStep,
    keeping_all,
    metrics,
    same_weights,
    three,
    train,
)

from coordinator.job import prepare
from coordinator.progress import SilentProgress
from coordinator.session import Session
from coordinator.watch import Watch
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, PlanConfig, RunConfig
from edgetrain.errors import DeviceError, DivergedError, FleetError
from edgetrain.sim.fleet import ProcessFleet, ThreadFleet
from edgetrain.train_config import TrainConfig
from edgetrain.transport.base import Payload
from edgetrain.transport.broker import embedded_broker
from edgetrain.transport.memory import MemoryHub, MemoryTransport
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.topics import COORDINATOR, Channel

EVAL_EVERY = 4


def config(
    folder: Path, train_config: TrainConfig, step_timeout_s: float = 60.0
) -> RunConfig:
    """Fit y = xW through three linear layers; a high rate makes it diverge, slowly."""
    node = helper.make_node
    model = build(
        [
            node("MatMul", ["x", "w1"], ["a"]),
            node("MatMul", ["a", "w2"], ["b"]),
            node("MatMul", ["b", "w3"], ["y"]),
        ],
        [("x", ["N", 6])],
        ["y"],
        {f"w{i}": normal(6, 6, seed=i) / 3 for i in (1, 2, 3)},
    )
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    x = normal(64, 6)
    np.savez(folder / "data.npz", x=x, labels=x @ normal(6, 6, seed=9) / 2)
    return RunConfig(
        ModelConfig(folder / "model.onnx", loss="mse"),
        DataConfig(folder / "data.npz", folder / "data.npz"),
        train_config,
        PlanConfig(cuts=("a", "b"), pin=IN_ORDER),
        FleetConfig(devices=NAMES, step_timeout_s=step_timeout_s),
    )


def settings(steps: int, lr: float = 0.01) -> TrainConfig:
    return TrainConfig(
        steps=steps, batch_size=16, microbatches=2, lr=lr, eval_every=EVAL_EVERY
    )


def reference(folder: Path, steps: int, lr: float = 0.01) -> Path:
    """The folder of a run that was meant to have so many steps."""
    return train(config(folder, settings(steps, lr)), folder / "run").folder


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


@pytest.mark.parametrize("asked_after", [1, 4, 6])
def test_a_stopped_run_keeps_its_weights_and_says_so(
    asked_after: int, tmp_path: Path
) -> None:
    done = []
    watch = Watch(OnStep(done.append), lambda: len(done) >= asked_after)
    outcome = train(config(tmp_path, settings(1000)), tmp_path / "run", watch=watch)
    assert outcome.interrupted
    assert asked_after <= outcome.steps <= asked_after + 2, "steps under way are finished"
    assert outcome.steps == len(losses(outcome.folder))
    assert (outcome.folder / "report.html").exists()
    assert same_weights(outcome.folder, reference(tmp_path / "ref", outcome.steps))


def test_a_run_stopped_before_its_first_step_keeps_the_model(tmp_path: Path) -> None:
    watch = Watch(SilentProgress(), lambda: True)
    outcome = train(config(tmp_path, settings(10)), tmp_path / "run", watch=watch)
    assert (outcome.interrupted, outcome.steps) == (True, 0)
    assert outcome.model.read_bytes() == (tmp_path / "model.onnx").read_bytes()


def test_a_finished_run_was_not_interrupted(tmp_path: Path) -> None:
    outcome = train(config(tmp_path, settings(3)), tmp_path / "run")
    assert (outcome.interrupted, outcome.steps) == (False, 3)


def test_a_diverged_run_keeps_the_last_weights_with_a_finite_loss(tmp_path: Path) -> None:
    lr = 3.0
    with pytest.raises(DivergedError) as caught:
        train(config(tmp_path, settings(1000, lr)), tmp_path / "run")
    bad = caught.value.step  # from 0, unlike in messages and metrics
    assert f"step {bad + 1} " in str(caught.value)
    finite = losses(tmp_path / "run")
    assert bad > 3
    assert len(finite) == bad
    assert None not in finite
    # The weights after step `bad` - 1 gave the loss that was not finite; those before it
    # gave the last finite one.
    good = reference(tmp_path / "ref", bad - 1, lr)
    assert losses(good) == finite[: bad - 1]
    assert same_weights(tmp_path / "run", good)
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_whose_first_loss_is_not_finite_keeps_the_model(tmp_path: Path) -> None:
    run = config(tmp_path, settings(10))
    np.savez(
        tmp_path / "data.npz", x=np.full((64, 6), 1e30, np.float32), labels=normal(64, 6)
    )
    with pytest.raises(DivergedError):
        train(run, tmp_path / "run")
    kept = (tmp_path / "run" / "trained.onnx").read_bytes()
    assert kept == (tmp_path / "model.onnx").read_bytes()


@pytest.mark.parametrize("victim", NAMES)
def test_a_killed_agent_is_named_and_the_weights_kept_last_stay(
    victim: str, tmp_path: Path
) -> None:
    hub = MemoryHub()
    fleet = ThreadFleet(lambda name: MemoryTransport(hub, name), three())

    def kill(step: int) -> None:
        if step == EVAL_EVERY + 2:
            fleet.kill(victim)

    job = prepare(config(tmp_path, settings(1000)))
    watch = keeping_all(OnStep(kill), lambda: False)
    with fleet, pytest.raises(DeviceError) as caught:
        Session(job, MemoryTransport(hub, COORDINATOR), watch).train(tmp_path / "run")
    assert caught.value.device == victim
    assert any(f"after step {EVAL_EVERY}" in note for note in caught.value.__notes__)
    assert same_weights(tmp_path / "run", reference(tmp_path / "ref", EVAL_EVERY))


def test_an_agent_process_that_dies_is_missed_by_the_broker(tmp_path: Path) -> None:
    """Its connection just ends: the broker publishes its last will."""
    with embedded_broker() as broker, ProcessFleet(broker.url, three()) as fleet:

        def kill(step: int) -> None:
            if step == EVAL_EVERY + 2:
                fleet.kill("two")

        job = prepare(config(tmp_path, settings(1000)))
        coordinator = MqttTransport(broker.url, COORDINATOR)
        watch = keeping_all(OnStep(kill), lambda: False)
        with pytest.raises(DeviceError) as caught:
            Session(job, coordinator, watch).train(tmp_path / "run")
    assert caught.value.device == "two"
    assert same_weights(tmp_path / "run", reference(tmp_path / "ref", EVAL_EVERY))


class Mute(MemoryTransport):
    """From some moment on nothing it sends arrives, though its connection stays."""

    muted = False

    def send(self, to: str, channel: Channel, payload: Payload) -> None:
        if not self.muted:
            super().send(to, channel, payload)


@pytest.mark.parametrize("silent", NAMES)
def test_a_silent_device_ends_the_run_in_time(silent: str, tmp_path: Path) -> None:
    hub = MemoryHub()
    transports = {name: Mute(hub, name) for name in NAMES}

    def mute(step: int) -> None:
        if step == EVAL_EVERY + 2:
            transports[silent].muted = True

    job = prepare(config(tmp_path, settings(1000), step_timeout_s=2))
    watch = keeping_all(OnStep(mute), lambda: False)
    fleet = ThreadFleet(transports.__getitem__, three())
    message = rf"nothing happened for 2 s; step \d+ waits for .*{silent}.*step_timeout_s"
    with fleet, pytest.raises(FleetError, match=message):
        Session(job, MemoryTransport(hub, COORDINATOR), watch).train(tmp_path / "run")
    assert same_weights(tmp_path / "run", reference(tmp_path / "ref", EVAL_EVERY))
