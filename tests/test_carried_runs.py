"""Whole runs without a backward graph: they learn, repeat, and send little back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from lenet import lenet
from small_models import build, normal
from small_task import CLASSES, blobs
from training import (
    Sent,
    Wire,
    metrics,
    on_three,
    same_weights,
    three,
    train,
    weights_of,
)

from coordinator.job import prepare
from coordinator.progress import SilentProgress
from coordinator.session import Session
from coordinator.watch import Watch
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, RunConfig
from edgetrain.errors import PlanError
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.sim.fleet import ProcessFleet, SimDevice
from edgetrain.train_config import TrainConfig
from edgetrain.transport.broker import Broker
from edgetrain.transport.mqtt import MqttSettings, MqttTransport
from edgetrain.wire.frame import HEADER_BYTES, Kind, wire_bytes
from edgetrain.wire.topics import COORDINATOR

CUTS = ("r1", "r2")
CHUNK_BYTES = 256 * 1024
CASES = {
    "activations": ("forward_gradient", EstimatorSpec(2, control_variate=False)),
    "guided": ("forward_gradient", EstimatorSpec(2)),
    "differences": ("forward_gradient", EstimatorSpec(2, form="forward")),
    "weights": ("forward_gradient", EstimatorSpec(4, noise="weights")),
    "spsa": ("spsa", EstimatorSpec(4)),
}


def three_layers() -> onnx.ModelProto:
    node = onnx.helper.make_node
    widths, nodes, weights = [4, 16, 16, CLASSES], [], {}
    for i in range(3):
        value = "x" if i == 0 else f"r{i}"
        product = "y" if i == 2 else f"h{i + 1}"
        nodes.append(node("Gemm", [value, f"w{i}", f"b{i}"], [product]))
        if i < 2:
            nodes.append(node("Relu", [product], [f"r{i + 1}"]))
        scale = np.float32(np.sqrt(2 / widths[i]))
        weights[f"w{i}"] = scale * normal(widths[i], widths[i + 1], seed=i)
        weights[f"b{i}"] = np.zeros(widths[i + 1], np.float32)
    return build(nodes, [("x", ["N", 4])], ["y"], weights)


def run_of(folder: Path, case: str, **options: object) -> RunConfig:
    """Forty steps on three clouds of points."""
    onnx.save(three_layers(), folder / "m.onnx")
    np.savez(folder / "train.npz", **blobs(256))
    np.savez(folder / "eval.npz", **blobs(128, seed=1))
    gradient, spec = CASES[case]
    plain = {"steps": 40, "microbatches": 2, "optimizer": "adam", "lr": 0.03}
    return RunConfig(
        ModelConfig(folder / "m.onnx", trainable="all"),
        DataConfig(folder / "train.npz", folder / "eval.npz"),
        TrainConfig(**(plain | {"gradient": gradient} | options)),
        estimator=msgspec.structs.replace(spec, gate=False),
    )


@pytest.mark.parametrize("case", ["guided", "spsa"])
def test_processes_on_a_broker_end_with_the_bits_of_threads(
    case: str, tmp_path: Path, edgetrain_broker: Broker
) -> None:
    """Noise is never sent: every host draws it, and all draw the same."""
    config = on_three(run_of(tmp_path, case, steps=8), CUTS)
    train(config, tmp_path / "threads")
    name = f"bits-{case}"
    with ProcessFleet(edgetrain_broker.url, three(), name):
        place = MqttSettings(namespace=name)
        coordinator = MqttTransport(edgetrain_broker.url, COORDINATOR, settings=place)
        session = Session(prepare(config), coordinator, Watch(SilentProgress()))
        session.train(tmp_path / "processes")
    assert same_weights(tmp_path / "processes", tmp_path / "threads")


@pytest.mark.parametrize("case", CASES)
def test_it_learns_and_repeats_to_the_bit(case: str, tmp_path: Path) -> None:
    """Under any schedule; another seed draws other noise."""
    config = on_three(run_of(tmp_path, case), CUTS)
    outcome = train(config, tmp_path / "one")
    assert outcome.score is not None
    assert outcome.score.accuracy is not None
    assert outcome.score.accuracy > 0.9
    losses = [line["loss"] for line in metrics(tmp_path / "one") if "loss" in line]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:3])
    train(on_three(run_of(tmp_path, case, schedule="gpipe"), CUTS), tmp_path / "two")
    assert same_weights(tmp_path / "one", tmp_path / "two")
    options = {"seed": 1, "shuffle": False, "steps": 2}
    for seed in (1, 2):
        config = run_of(tmp_path, case, **(options | {"seed": seed}))
        train(on_three(config, CUTS), tmp_path / f"seed{seed}")
    assert not same_weights(tmp_path / "seed1", tmp_path / "seed2")


@pytest.mark.parametrize("case", ["activations", "weights", "spsa"])
def test_three_devices_train_what_one_does(case: str, tmp_path: Path) -> None:
    config = run_of(tmp_path, case, optimizer="sgd", lr=0.05, steps=5)
    train(on_three(config, CUTS), tmp_path / "three")
    alone = msgspec.structs.replace(config, fleet=FleetConfig(devices=("one",)))
    train(alone, tmp_path / "alone", [SimDevice("one")])
    found, expected = (
        weights_of(tmp_path / n / "trained.onnx") for n in ("three", "alone")
    )
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)


def lenet_run(folder: Path, gradient: str, spec: EstimatorSpec) -> RunConfig:
    """Two steps of LeNet on noise, all of it trained."""
    onnx.save(lenet(), folder / "lenet.onnx")
    labels = np.arange(64) % 10
    np.savez(folder / "images.npz", x=normal(64, 1, 28, 28), labels=labels)
    config = RunConfig(
        ModelConfig(folder / "lenet.onnx", trainable="all"),
        DataConfig(folder / "images.npz", folder / "images.npz"),
        TrainConfig(steps=2, batch_size=32, microbatches=2, gradient=gradient),
        estimator=spec,
    )
    return on_three(config, ("pool1", "flat"))


def returned(wire: Wire) -> int:
    """Bytes of what goes upstream, headers included."""

    def upstream(sent: Sent) -> bool:
        return sent.frame.address.kind is Kind.COTANGENT

    return sum(len(sent.payload) for sent in wire.data() if upstream(sent))


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("activations", ((4, 16),)),
        ("guided", ((4, 16), (16, 10), (4, 16, 10))),
        ("spsa", ((4, 1),)),
    ],
)
def test_what_crosses_the_cuts(
    case: str, sizes: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    """Tangents or variants beside activations; upstream less than 1 % of backprop's."""
    gradient, spec = CASES[case]
    spec = EstimatorSpec(4, control_variate=spec.control_variate)
    wire, exact = Wire(), Wire()
    train(lenet_run(tmp_path, gradient, spec), tmp_path / "run", wire=wire)
    train(lenet_run(tmp_path, "vjp", spec), tmp_path / "vjp", wire=exact)
    rays = 8 if case == "spsa" else 4
    crossing = [16 * 4 * floats for floats in (6 * 14 * 14, 400)]
    bodies = [16 * 4 * 784, 16 * 8]
    bodies += [size * count for size in crossing for count in (1, rays)]
    slopes = [4 * int(np.prod(shape)) for shape in sizes]
    bodies += [size for size in slopes for _ in crossing]
    expected = 2 * sum(wire_bytes(body, CHUNK_BYTES) for body in bodies)
    assert [wire.step_bytes(step) for step in range(2)] == [expected] * 2
    reported = [m["bytes_sent"] for m in metrics(tmp_path / "run") if "bytes_sent" in m]
    assert reported == [expected] * 2
    back = 2 * 2 * 2 * sum(size + HEADER_BYTES for size in slopes)
    assert returned(wire) == back
    if case != "guided":
        assert back < 0.01 * returned(exact)


def test_left_to_itself_such_a_run_trains_the_last_two_layers(tmp_path: Path) -> None:
    """And says so; asked for all, it trains all."""
    for gradient in ("spsa", ("spsa",) * 3, dict.fromkeys(("one", "two", "three"), "spsa")):
        config = run_of(tmp_path, "spsa", gradient=gradient)
        assert prepare(config).trainable == {f"{k}{i}" for k in "wb" for i in range(3)}
        path = config.model.path
        config = msgspec.structs.replace(config, model=ModelConfig(path))
        job = prepare(config)
        assert job.trainable == {"w1", "b1", "w2", "b2"}
        (remark,) = job.program.remarks
        assert "all stages train by 'spsa'" in remark
        assert "trainable = 'all'" in remark
    mixed = run_of(tmp_path, "spsa", gradient=("frozen", "spsa", "spsa"))
    mixed = msgspec.structs.replace(mixed, model=ModelConfig(path))
    assert prepare(mixed).trainable == {f"{k}{i}" for k in "wb" for i in range(3)}
    outcome = train(on_three(config, CUTS), tmp_path / "run")
    assert outcome.remarks == (remark,)
    found, start = (weights_of(p) for p in (tmp_path / "run" / "trained.onnx", path))
    kept = {name for name, value in start.items() if np.array_equal(found[name], value)}
    assert kept == {"w0", "b0"}


def test_a_stage_that_cannot_carry_it_on_is_named(tmp_path: Path) -> None:
    config = run_of(tmp_path, "guided", gradient=("forward_gradient", "auto", "auto"))
    with pytest.raises(PlanError, match="stage 1 after it is 'vjp'"):
        train(on_three(config, CUTS), tmp_path / "run")
    config = run_of(tmp_path, "guided", gradient=("vjp", "auto", "auto"))
    devices = three(("auto", "auto", "spsa"))
    with pytest.raises(PlanError, match="but nothing comes back from stage 2, 'spsa' on"):
        train(on_three(config, CUTS), tmp_path / "other", devices)
