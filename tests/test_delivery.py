"""Whole parties over links that harm tensors: everything arrives, or there is an error."""

import contextlib
import queue
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from party import WAIT_S, mosquitto
from small_models import build, normal
from training import OnStep, on_three, same_weights, three
from training import train as train_calmly

from coordinator.job import prepare
from coordinator.progress import SilentProgress
from coordinator.session import Session
from coordinator.watch import Watch
from edgetrain.config import DataConfig, ModelConfig, RunConfig
from edgetrain.errors import WireError
from edgetrain.runtime.inbox import MAX_STREAMS, Bounds, Inbox
from edgetrain.runtime.outbox import Outbox
from edgetrain.sim.faulty import Faults, FaultyTransport
from edgetrain.sim.fleet import ThreadFleet
from edgetrain.train_config import TrainConfig
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.base import Inbound, Transport
from edgetrain.transport.broker import embedded_broker
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.memory import MemoryHub, MemoryTransport
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.frame import Address, Kind, Parcel, frames, parse
from edgetrain.wire.reassembly import Message
from edgetrain.wire.ticket import Ticket
from edgetrain.wire.topics import COORDINATOR, Channel

WIDTH = 300
HARM = Faults(lose=0.05, duplicate=0.05, reorder=0.05, damage=0.05)


class Station:
    """A party with an inbox and an outbox; its messages wait until `take`."""

    def __init__(self, transport: Transport, *, patience_s: float = 60.0) -> None:
        self.transport = transport
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[tuple[str, int, int, str]] = queue.SimpleQueue()
        bounds = Bounds(window_bytes=1 << 20)
        self.inbox = Inbox(lambda _source, address: address.run == 1, bounds=bounds)
        self.outbox = Outbox(
            transport,
            self.inbox,
            self.messages.put,
            lambda *failure: self.failures.put(failure),
            patience_s=patience_s,
        )
        transport.open(self._receive)

    def _receive(self, inbound: Inbound) -> None:
        with contextlib.suppress(WireError):
            message = self.inbox.receive(inbound)
            if message is not None:
                self.messages.put(message)

    def take(self) -> Message:
        message = self.messages.get(timeout=WAIT_S)
        message.taken()
        return message

    def close(self) -> None:
        self.outbox.close()
        self.transport.close()


@pytest.fixture
def station() -> Iterator[Callable[..., Station]]:
    made: list[Station] = []

    def make(transport: Transport, **more: float) -> Station:
        made.append(Station(transport, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def address(step: int, *, epoch: int = 0, run: int = 1) -> Address:
    return Address(Kind.ACTIVATION, run, epoch, 1, step=step)


def array(step: int, size: int = 100_000) -> np.ndarray:
    return np.random.default_rng(step).normal(size=size).astype(np.float32)


def test_tensors_arrive_once_and_intact_over_a_bad_link(station) -> None:
    hub = MemoryHub()
    a, b = (
        station(FaultyTransport(MemoryTransport(hub, name), HARM)) for name in ("a", "b")
    )
    for step in range(20):
        for one, other in ((a, "b"), (b, "a")):
            one.outbox.put(other, address(step), array(step), chunk_bytes=50_000)
    for one in (a, b):
        arrived = {m.address.step: m for m in (one.take() for _ in range(20))}
        for step in range(20):
            np.testing.assert_array_equal(arrived[step].array((100_000,)), array(step))
        assert one.messages.empty()


def test_a_receiver_that_takes_nothing_holds_its_sender_up(station) -> None:
    a, b = (station(MemoryTransport(hub, name)) for hub in [MemoryHub()] for name in "ab")
    for step in range(200):
        a.outbox.put("b", address(step), array(step), chunk_bytes=50_000)
    assert not a.outbox.room  # 80 MB
    first = b.take()
    assert b.messages.qsize() <= 3  # 400 KB each, in a window of 1 MiB
    assert first.address.step == 0
    assert [b.take().address.step for _ in range(199)] == list(range(1, 200))


def test_frames_of_other_runs_and_older_epochs_are_dropped(station) -> None:
    a, b = (station(MemoryTransport(hub, name)) for hub in [MemoryHub()] for name in "ab")
    for place in ({"run": 2}, {"epoch": 1}, {"epoch": 0}, {"epoch": 2}):
        for frame in frames(address(0, **place), bytes(10), chunk_bytes=100):
            a.transport.send("b", Channel.DATA, frame)
    assert [b.take().address.epoch for _ in range(2)] == [1, 2]
    assert b.messages.empty()


def test_streams_of_runs_that_are_over_make_room_for_others() -> None:
    inbox = Inbox(lambda *_: True)

    def gives(number: int, run: int) -> bool:
        (frame,) = frames(address(number, run=run), b"x", chunk_bytes=9)
        payload = bytes(renumbered(frame, number))
        return inbox.receive(Inbound("a", Channel.DATA, payload)) is not None

    assert gives(0, run=1)
    for run in range(2, 3 * MAX_STREAMS):
        assert gives(0, run=run)
    assert len(inbox._streams) == MAX_STREAMS
    assert gives(1, run=run)
    assert not gives(1, run=run), "a duplicate"


def test_a_peer_that_ignores_its_window_is_cut_off(station) -> None:
    hub = MemoryHub()
    b, evil = station(MemoryTransport(hub, "b")), MemoryTransport(hub, "evil")
    evil.open(lambda _: None)
    for number in range(100):
        (frame,) = frames(address(number), bytes(900_000), chunk_bytes=900_000)
        evil.send("b", Channel.DATA, renumbered(frame, number))
    peer, run, epoch, reason = b.failures.get(timeout=WAIT_S)
    assert (peer, run, epoch) == ("evil", 1, 0)
    assert "evil is cut off" in reason
    assert "the window is 1048576 B" in reason
    assert b.messages.qsize() == 1


def renumbered(frame: bytearray, number: int) -> bytearray:
    """The only frame of its message, as the one of that number in its stream."""
    parsed = parse(frame, max_body_bytes=1 << 20)
    parcel = Parcel(parsed.address, parsed.body, 1 << 20)
    return parcel.frame(0, Ticket(number, number, number))


def test_a_peer_that_never_answers_is_named(station) -> None:
    hub = MemoryHub()
    a = station(MemoryTransport(hub, "a"), patience_s=1.5)
    a.outbox.put("nobody", address(0), array(0), chunk_bytes=50_000)
    peer, run, epoch, reason = a.failures.get(timeout=WAIT_S)
    assert (peer, run, epoch) == ("nobody", 1, 0)
    assert "no answer from nobody for 1.5 s" in reason
    assert a.outbox.room


def test_a_sender_that_starts_anew_is_heard(station) -> None:
    hub = MemoryHub()
    b = station(MemoryTransport(hub, "b"))
    for attempt in range(3):
        a = Station(MemoryTransport(hub, "a"))
        a.outbox.put("b", address(attempt), array(attempt), chunk_bytes=50_000)
        assert b.take().address.step == attempt
        a.close()


@pytest.mark.parametrize("kind", ["iotcore", mosquitto])
def test_nothing_is_lost_when_the_broker_starts_again(kind, station, tmp_path) -> None:
    settings = MqttSettings(namespace="restart", lost_after_s=WAIT_S)
    with embedded_broker(kind=kind, directory=tmp_path) as broker:
        url = broker.url
        a, b = (station(MqttTransport(url, n, settings=settings)) for n in ("a", "b"))
        for step in range(60):
            a.outbox.put("b", address(step), array(step), chunk_bytes=50_000)
        steps = [b.take().address.step for _ in range(10)]
    place = BrokerAddress.parse(url)
    again = {"port": place.port, "password": place.password}
    with embedded_broker(kind=kind, directory=tmp_path, **again):
        steps += [b.take().address.step for _ in range(50)]
        assert b.messages.empty()
        a.close()
        b.close()
    assert sorted(steps) == list(range(60))


def dense_run(folder: Path) -> RunConfig:
    """Three linear layers: they have no fast path, whose bits would be others."""
    node = helper.make_node
    model = build(
        [
            node("MatMul", ["x", "w1"], ["a"]),
            node("MatMul", ["a", "w2"], ["b"]),
            node("MatMul", ["b", "w3"], ["y"]),
        ],
        [("x", ["N", WIDTH])],
        ["y"],
        {f"w{i}": normal(WIDTH, WIDTH, seed=i) / 20 for i in (1, 2, 3)},
    )
    onnx.save(model, folder / "model.onnx")
    x = normal(512, WIDTH)
    np.savez(folder / "data.npz", x=x, labels=x[:, ::-1])
    config = RunConfig(
        ModelConfig(folder / "model.onnx", loss="mse"),
        DataConfig(folder / "data.npz", folder / "data.npz"),
        TrainConfig(steps=4, batch_size=256, microbatches=4, eval_every=2),
    )
    return on_three(config, ("a", "b"))


@pytest.mark.parametrize("seed", range(2))
def test_a_run_over_bad_links_ends_with_the_same_weights(seed: int, tmp_path: Path) -> None:
    config = dense_run(tmp_path)
    train_calmly(config, tmp_path / "calm")
    hub = MemoryHub()
    faults = Faults(lose=0.03, duplicate=0.05, reorder=0.05, damage=0.03, seed=seed)

    def bad(name: str) -> Transport:
        return FaultyTransport(MemoryTransport(hub, name), faults)

    with ThreadFleet(bad, three()):
        session = Session(prepare(config), bad(COORDINATOR), Watch(SilentProgress()))
        session.train(tmp_path / "harmed")
    assert same_weights(tmp_path / "calm", tmp_path / "harmed")


@pytest.mark.skipif(not shutil.which("mosquitto"), reason="no mosquitto on PATH")
def test_a_run_goes_on_when_the_broker_crashes_and_starts_again(tmp_path: Path) -> None:
    config = dense_run(tmp_path)
    train_calmly(config, tmp_path / "calm")
    settings = MqttSettings(namespace="restart", lost_after_s=WAIT_S)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    broker = tmp_path / "mosquitto.conf"
    broker.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")

    def connected(name: str) -> Transport:
        return MqttTransport(f"mqtt://127.0.0.1:{port}", name, settings=settings)

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(  # noqa: S603
            [shutil.which("mosquitto"), "-c", broker], stderr=subprocess.DEVNULL
        )
        for _ in range(100):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port)),
            ):
                return process
            threading.Event().wait(0.05)
        raise AssertionError("mosquitto does not start")

    running = [start()]

    def crash(step: int) -> None:
        if step == 2:
            running[0].kill()
            running[0].wait()
            running[0] = start()

    with ThreadFleet(connected, three()):
        watch = Watch(OnStep(crash))
        Session(prepare(config), connected(COORDINATOR), watch).train(tmp_path / "run")
    running[0].kill()
    running[0].wait()
    assert same_weights(tmp_path / "calm", tmp_path / "run")


@pytest.mark.parametrize("kind", ["iotcore", mosquitto])
def test_a_party_whose_place_another_took_is_heard_again(kind, station, tmp_path) -> None:
    """A client that connects with our id throws us off the broker, once."""
    settings = MqttSettings(namespace="takeover", lost_after_s=WAIT_S)
    with embedded_broker(kind=kind, directory=tmp_path) as broker:
        a, b = (
            station(MqttTransport(broker.url, name, settings=settings)) for name in "ab"
        )
        for step in range(40):
            a.outbox.put("b", address(step), array(step), chunk_bytes=50_000)
        steps = [b.take().address.step for _ in range(5)]
        for one in (a, b):
            take_over(broker.url, one.transport._links[Channel.DATA]._spec.client_id)
            steps += [b.take().address.step for _ in range(10)]
        steps += [b.take().address.step for _ in range(15)]
        assert b.messages.empty()
        a.close()
        b.close()
    assert sorted(steps) == list(range(40))


def take_over(url: str, client_id: str) -> None:
    place = BrokerAddress.parse(url)
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id)
    client.username_pw_set(place.username, place.password)
    connected = threading.Event()
    client.on_connect = lambda *_: connected.set()
    client.connect(place.host, place.port)
    client.loop_start()
    assert connected.wait(WAIT_S)
    client.disconnect()
    client.loop_stop()
