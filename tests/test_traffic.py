"""What a step puts on the wire is what the shapes say, and what the metrics say."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import onnx
import paho.mqtt.client as paho
import pytest
from lenet import lenet
from onnx import helper
from party import mosquitto
from small_models import build, normal
from training import NAMES, Sent, Wire, metrics, on_three, three, train

from coordinator.job import prepare
from coordinator.progress import SilentProgress
from coordinator.session import Session
from coordinator.watch import Watch
from edgetrain.config import DataConfig, ModelConfig, RunConfig
from edgetrain.sim.fleet import ThreadFleet
from edgetrain.train_config import TrainConfig
from edgetrain.transport.broker import embedded_broker
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.frame import Kind
from edgetrain.wire.topics import COORDINATOR, Channel, parse_inbox

STEPS = 3
BATCH = 32
MICROBATCHES = 2
HEADER_BYTES = 80  # of a frame
KIB = 1024

LENET_CUTS = ("pool1", "flat")
# Floats a sample that cross each link: to the first stage, then the cuts there and back.
LENET_FLOATS = [28 * 28, *2 * [6 * 14 * 14], *2 * [400]]


def expected_bytes(batch: int, floats: list[int], labelled: int = 1) -> int:
    """Of a step: activations, cotangents and int64 labels, each with its headers.

    Args:
        batch: samples.
        floats: a sample, of each tensor.
        labelled: how many stages take labels.
    """
    samples = batch // MICROBATCHES
    bodies = [*(4 * samples * count for count in floats), *labelled * [8 * samples]]
    headers = HEADER_BYTES * sum(frames(body) for body in bodies)
    return MICROBATCHES * (sum(bodies) + headers)


def frames(body_bytes: int) -> int:
    """One for each 256 KiB; a body near the largest TCP segment goes in two halves."""
    if 56 * KIB < body_bytes <= 96 * KIB:
        return 2
    return math.ceil(body_bytes / (256 * KIB))


def lenet_run(folder: Path, batch: int = BATCH, steps: int = STEPS) -> RunConfig:
    """Steps of LeNet on noise, with an evaluation in between."""
    onnx.save(lenet(), folder / "model.onnx")
    labels = np.arange(2 * batch) % 10
    np.savez(folder / "data.npz", x=normal(2 * batch, 1, 28, 28), labels=labels)
    config = RunConfig(
        ModelConfig(folder / "model.onnx"),
        DataConfig(folder / "data.npz", folder / "data.npz"),
        TrainConfig(steps=steps, batch_size=batch, microbatches=MICROBATCHES, eval_every=2),
    )
    return on_three(config, LENET_CUTS)


def reported(folder: Path) -> list[float]:
    return [line["bytes_sent"] for line in metrics(folder) if "bytes_sent" in line]


@pytest.mark.parametrize("batch", [2, 32, 300])
def test_traffic_is_tensors_and_headers(batch: int, tmp_path: Path) -> None:
    wire = Wire()
    train(lenet_run(tmp_path, batch), tmp_path / "run", wire=wire)
    counted = [wire.step_bytes(step) for step in range(STEPS)]
    assert counted == [expected_bytes(batch, LENET_FLOATS)] * STEPS
    assert counted == reported(tmp_path / "run")


@pytest.mark.parametrize(
    ("gradient", "floats", "labelled"),
    [
        (("local_vjp", "local", "auto"), [28 * 28, 6 * 14 * 14, 400], 3),
        (("local_vjp", "auto", "auto"), [28 * 28, 6 * 14 * 14, *2 * [400]], 2),
    ],
)
def test_heads_take_labels_and_send_nothing_back(
    gradient: tuple[str, ...], floats: list[int], labelled: int, tmp_path: Path
) -> None:
    wire = Wire()
    train(lenet_run(tmp_path), tmp_path / "run", three(gradient), wire=wire)
    counted = [wire.step_bytes(step) for step in range(STEPS)]
    assert counted == [expected_bytes(BATCH, floats, labelled)] * STEPS
    assert counted == reported(tmp_path / "run")
    upstream = [s for s in wire.data() if s.frame.address.kind is Kind.COTANGENT]
    assert all(sent.to == "two" for sent in upstream)
    assert bool(upstream) == (labelled == 2)
    evaluated = [
        sent.to
        for sent in wire.data()
        if sent.frame.address.kind is Kind.LABELS and sent.frame.address.evaluation
    ]
    assert set(evaluated) == {"three"}


def test_control_messages_add_little(tmp_path: Path) -> None:
    """The whole wire, both channels, of some steps more in an otherwise equal run."""
    totals = []
    for steps in (4, 14):
        wire = Wire()
        folder = tmp_path / str(steps)
        folder.mkdir()
        config = lenet_run(folder, steps=steps)
        config = RunConfig(
            config.model,
            DataConfig(config.data.train),
            TrainConfig(steps=steps, batch_size=BATCH, microbatches=2, eval_every=100),
            config.plan,
            config.fleet,
        )
        train(config, folder / "run", wire=wire)
        totals.append(sum(len(sent.payload) for sent in wire.messages))
    expected = 10 * expected_bytes(BATCH, LENET_FLOATS)
    assert totals[1] - totals[0] == pytest.approx(expected, rel=0.05)


def test_every_tensor_of_a_cut_counts(tmp_path: Path) -> None:
    """Two tensors cross the first cut, and the second of them crosses the next one too."""
    node = helper.make_node
    tensors = {f"w{i}": normal(12, 12, seed=i) / 4 for i in range(3)}
    tensors["w3"] = normal(12, 5, seed=3)
    model = build(
        [
            node("MatMul", ["x", "w0"], ["a"]),
            node("Relu", ["a"], ["skip"]),
            node("MatMul", ["skip", "w1"], ["b"]),
            node("Relu", ["b"], ["c"]),
            node("MatMul", ["c", "w2"], ["d"]),
            node("Add", ["d", "skip"], ["e"]),
            node("Relu", ["e"], ["f"]),
            node("MatMul", ["f", "w3"], ["y"]),
        ],
        [("x", ["N", 12])],
        ["y"],
        tensors,
    )
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=normal(64, 12), labels=np.arange(64) % 5)
    config = RunConfig(
        ModelConfig(tmp_path / "model.onnx"),
        DataConfig(tmp_path / "data.npz"),
        TrainConfig(steps=STEPS, batch_size=BATCH, microbatches=MICROBATCHES),
    )
    wire = Wire()
    train(on_three(config, ("c", "f")), tmp_path / "run", wire=wire)
    floats = [12, *2 * [12, 12], *2 * [12]]
    counted = [wire.step_bytes(step) for step in range(STEPS)]
    assert counted == [expected_bytes(BATCH, floats)] * STEPS
    assert counted == reported(tmp_path / "run")


@contextmanager
def listening(url: str, namespace: str) -> Iterator[Wire]:
    """Everything that a broker passes on in a namespace; complete when the context ends."""
    wire, subscribed, ended = Wire(), threading.Event(), threading.Event()
    end = f"{namespace}/end"

    def on_message(_client, _userdata, message: paho.MQTTMessage) -> None:
        if message.topic == end:
            ended.set()
        elif "/dev/" in message.topic:
            to, source, channel = parse_inbox(message.topic)
            wire.messages.append(Sent(source, to, channel, bytes(message.payload)))

    client = paho.Client(paho.CallbackAPIVersion.VERSION2, f"ear-{secrets.token_hex(4)}")
    place = urlsplit(url)
    client.username_pw_set(place.username, place.password)
    client.on_message = on_message
    client.on_subscribe = lambda *_: subscribed.set()
    client.connect(place.hostname, place.port)
    client.loop_start()
    client.subscribe(f"{namespace}/#")
    assert subscribed.wait(10)
    try:
        yield wire
        client.publish(end, b"")
        assert ended.wait(10)
    finally:
        client.disconnect()
        client.loop_stop()


@pytest.mark.parametrize("kind", ["iotcore", mosquitto])
def test_the_same_over_mqtt(kind: str, tmp_path: Path) -> None:
    config = lenet_run(tmp_path)
    settings = MqttSettings(namespace="traffic")
    with (
        embedded_broker(kind=kind, directory=tmp_path) as broker,
        listening(broker.url, settings.namespace) as wire,
    ):
        devices = three()
        with ThreadFleet(
            lambda name: MqttTransport(broker.url, name, settings=settings), devices
        ):
            transport = MqttTransport(broker.url, COORDINATOR, settings=settings)
            session = Session(prepare(config), transport, Watch(SilentProgress()))
            session.train(tmp_path / "run")
    counted = [wire.step_bytes(step) for step in range(STEPS)]
    assert counted == [expected_bytes(BATCH, LENET_FLOATS)] * STEPS
    assert counted == reported(tmp_path / "run")
    assert {sent.source for sent in wire.messages} == {COORDINATOR, *NAMES}
    assert {sent.channel for sent in wire.messages} == set(Channel)
