"""One contract for every transport: in memory, over brokers, and behind shaped links."""

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from party import WAIT_S, Party, mosquitto

from edgetrain.conditions import Conditions
from edgetrain.errors import ConfigError, TransportError
from edgetrain.sim.shaped import Bounds, ShapedTransport
from edgetrain.sim.timetable import Timetable
from edgetrain.transport.base import (
    DEFAULT_MAX_PAYLOAD_BYTES,
    Inbound,
    Transport,
)
from edgetrain.transport.broker import embedded_broker
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.memory import MemoryHub, MemoryTransport
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.frame import Address, Kind, frames, parse, wire_bytes
from edgetrain.wire.reassembly import Reassembler
from edgetrain.wire.topics import Channel

Join = Callable[..., Party]


LINK = Conditions(link="1 Gbit/s", latency_s=1e-3, jitter_s=1e-3, loss=0.01)
NETWORKS = ["memory", mosquitto, "iotcore", "shaped memory", "shaped iotcore"]


@pytest.fixture(params=NETWORKS, scope="module")
def network(request: pytest.FixtureRequest) -> Iterator[Callable[..., Transport]]:
    kind = request.param.removeprefix("shaped ")
    with contextlib.ExitStack() as stack:
        if kind == "memory":
            hub = MemoryHub()

            def plain(name: str, **limits: int) -> Transport:
                return MemoryTransport(hub, name, **limits)

        else:
            running = stack.enter_context(embedded_broker(kind=kind))

            def plain(name: str, **limits: int) -> Transport:
                return MqttTransport(running.url, name, settings=MqttSettings(**limits))

        def behind_a_link(name: str, **limits: int) -> Transport:
            bounds = Bounds(**limits)
            return ShapedTransport(plain(name), LINK, Timetable(LINK), bounds=bounds)

        yield behind_a_link if "shaped" in request.param else plain


@pytest.fixture
def join(network: Callable[..., Transport]) -> Iterator[Join]:
    parties = []

    def make(name: str, **limits: int) -> Party:
        parties.append(Party(network(name, **limits)))
        return parties[-1]

    yield make
    for party in parties:
        party.transport.close()


def test_messages_keep_their_order_within_a_channel(join: Join) -> None:
    a, b = join("a").open(), join("b").open()
    for i in range(300):
        for channel in Channel:
            a.transport.send("b", channel, i.to_bytes(2, "little"))
    arrived = [b.take() for _ in range(300 * len(Channel))]
    for channel in Channel:
        numbers = [
            int.from_bytes(m.payload, "little") for m in arrived if m.channel == channel
        ]
        assert numbers == list(range(300))
    assert {m.source for m in arrived} == {"a"}


def test_4_mb_travel_in_frames_both_ways_at_once(join: Join) -> None:
    parties = {name: join(name).open() for name in ("a", "b")}
    arrays = {
        name: np.random.default_rng(seed).normal(size=(1000, 1000)).astype(np.float32)
        for seed, name in enumerate(parties)
    }
    here = Address(Kind.ACTIVATION, 1, 0, 0)

    def send(name: str, to: str) -> None:
        for frame in frames(here, arrays[name], chunk_bytes=60_000):
            parties[name].transport.send(to, Channel.DATA, frame)

    senders = [threading.Thread(target=send, args=way) for way in (("a", "b"), ("b", "a"))]
    for sender in senders:
        sender.start()
    for name, other in (("a", "b"), ("b", "a")):
        reassembler, message = Reassembler(1 << 23), None
        while message is None:
            payload = parties[name].take().payload
            message = reassembler.feed(parse(payload, max_body_bytes=60_000))
        np.testing.assert_array_equal(message.array((1000, 1000)), arrays[other])
    for sender in senders:
        sender.join()
    for party in parties.values():
        expected = wire_bytes(4_000_000, 60_000)
        traffic = party.transport.traffic
        assert traffic.sent_bytes == Counter({Channel.DATA: expected})
        assert traffic.received_bytes == traffic.sent_bytes


def test_every_kind_of_payload_arrives_as_bytes(join: Join) -> None:
    a, b = join("a").open(), join("b").open()
    for payload in (b"one", bytearray(b"two"), memoryview(b"three"), b""):
        a.transport.send("b", Channel.CONTROL, payload)
        assert b.take() == Inbound("a", Channel.CONTROL, bytes(payload))
    assert a.transport.traffic.sent_bytes == Counter({Channel.CONTROL: 11})


def test_a_party_may_write_to_itself_and_to_nobody(join: Join) -> None:
    a = join("a").open()
    a.transport.send("nobody", Channel.CONTROL, b"lost")
    a.transport.send("a", Channel.CONTROL, b"kept")
    assert a.take().payload == b"kept"


def test_presence_is_kept_for_who_comes_later_and_ends_with_close(join: Join) -> None:
    early = join("coordinator").open(watch=True)
    device = join("a").open(b"hello")
    assert early.takes_presence() == ("a", b"hello")
    late = join("late").open(watch=True)
    assert late.takes_presence() == ("a", b"hello")
    device.transport.close()
    for watcher in (early, late):
        assert watcher.takes_presence() == ("a", b"")
    join("b").open(b"there")
    assert late.takes_presence() == ("b", b"there")
    assert join("later").open(watch=True).takes_presence() == ("b", b"there")


def test_a_killed_party_is_reported_gone(join: Join) -> None:
    watcher = join("coordinator").open(watch=True)
    device = join("a").open(b"hello")
    assert watcher.takes_presence() == ("a", b"hello")
    device.transport.kill()
    assert watcher.takes_presence() == ("a", b"")
    with pytest.raises(TransportError, match="killed"):
        device.transport.send("coordinator", Channel.DATA, b"from the grave")


def test_a_withdrawn_party_can_still_be_reached(join: Join) -> None:
    watcher = join("coordinator").open(watch=True)
    device = join("a").open(b"hello")
    assert watcher.takes_presence() == ("a", b"hello")
    device.transport.withdraw()
    device.transport.withdraw()
    assert watcher.takes_presence() == ("a", b"")
    watcher.transport.send("a", Channel.CONTROL, b"still there?")
    assert device.take().payload == b"still there?"


@pytest.mark.parametrize("channel", Channel)
def test_who_is_announced_can_be_reached(join: Join, channel: Channel) -> None:
    watcher = join("coordinator").open(watch=True)
    for i in range(5):
        name = f"device-{i}"
        device = join(name).open(b"hello")
        assert watcher.takes_presence()[0] == name
        watcher.transport.send(name, channel, b"welcome")
        assert device.take().payload == b"welcome"


def test_two_parties_of_one_name_do_not_throw_each_other_off(join: Join) -> None:
    watcher = join("coordinator").open(watch=True)
    twins = [join("a").open(b"first"), join("a").open(b"second")]
    assert [watcher.takes_presence() for _ in twins] == [("a", b"first"), ("a", b"second")]
    watcher.transport.send("a", Channel.CONTROL, b"which?")
    assert [twin.take().payload for twin in twins] == [b"which?", b"which?"]


def test_what_was_sent_before_close_still_arrives(join: Join) -> None:
    b = join("b").open()
    a = join("a").open()
    for _ in range(20):
        for channel in Channel:
            a.transport.send("b", channel, bytes(100_000))
    a.transport.close()
    a.transport.close()
    assert sum(len(b.take().payload) for _ in range(40)) == 4_000_000


def test_a_payload_over_the_limit_is_refused_here_and_the_connection_lives(
    join: Join,
) -> None:
    a, b = join("a", max_payload_bytes=1000).open(), join("b").open()
    for channel in Channel:
        with pytest.raises(TransportError, match=r"1001 B .* limit of 1000 B"):
            a.transport.send("b", channel, bytes(1001))
        a.transport.send("b", channel, bytes(1000))
        assert len(b.take().payload) == 1000


def test_the_largest_default_payload_passes(join: Join) -> None:
    a, b = join("a" * 64).open(), join("b" * 64).open()
    for channel in Channel:
        a.transport.send("b" * 64, channel, bytes(DEFAULT_MAX_PAYLOAD_BYTES))
        assert len(b.take().payload) == DEFAULT_MAX_PAYLOAD_BYTES


def test_sending_needs_an_open_transport(join: Join) -> None:
    a = join("a")
    with pytest.raises(TransportError, match="not open"):
        a.transport.send("b", Channel.DATA, b"")
    a.open()
    with pytest.raises(TransportError, match="opens once"):
        a.open()
    a.transport.close()
    for channel in Channel:
        with pytest.raises(TransportError, match="closed"):
            a.transport.send("b", channel, b"")


def test_an_error_in_a_callback_does_not_end_delivery(join: Join, caplog) -> None:
    arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive(inbound: Inbound) -> None:
        arrived.put(inbound.payload)
        if inbound.payload == b"bad":
            raise KeyError("out of order")

    a, b = join("a").open(), join("b")
    b.transport.open(receive)
    for payload in (b"bad", b"good"):
        a.transport.send("b", Channel.CONTROL, payload)
    assert [arrived.get(timeout=WAIT_S) for _ in range(2)] == [b"bad", b"good"]
    assert "out of order" in caplog.text


def test_a_name_that_breaks_topics_is_refused(network: Callable[..., Transport]) -> None:
    with pytest.raises(ConfigError, match="cannot be a name"):
        network("a/b")


def test_in_memory_a_sender_waits_while_its_window_is_full() -> None:
    hub, going_on = MemoryHub(), threading.Event()
    a, b = MemoryTransport(hub, "a", window_bytes=1000), MemoryTransport(hub, "b")
    counts: queue.SimpleQueue[int] = queue.SimpleQueue()

    def receive(_: Inbound) -> None:
        going_on.wait(WAIT_S)
        counts.put(sent)

    sent = 0
    b.open(receive)
    a.open(lambda _: None)

    def send() -> None:
        nonlocal sent
        for _ in range(50):
            a.send("b", Channel.DATA, bytes(300))
            sent += 1

    sender = threading.Thread(target=send)
    sender.start()
    going_on.wait(0.05)
    assert sent == 4  # the fourth entered below the limit, the fifth waits
    assert a._windows[Channel.DATA].held_bytes == 1200
    going_on.set()
    sender.join(WAIT_S)
    assert [counts.get(timeout=WAIT_S) <= i + 5 for i in range(50)] == [True] * 50
    a.close()
    b.close()


def test_the_hubs_tap_sees_all_traffic() -> None:
    seen: list[tuple[str, str, Channel, bytes]] = []
    hub = MemoryHub(tap=lambda *message: seen.append(message))
    with_tap = [MemoryTransport(hub, name) for name in ("a", "b")]
    for transport in with_tap:
        transport.open(lambda _: None)
    with_tap[0].send("b", Channel.DATA, b"1")
    with_tap[1].send("nobody", Channel.CONTROL, b"2")
    assert seen == [("a", "b", Channel.DATA, b"1"), ("b", "nobody", Channel.CONTROL, b"2")]
    for transport in with_tap:
        transport.close()
