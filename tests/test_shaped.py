"""Shaped links: exact departures by a told time, then real transports behind them."""

import math
import queue
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from party import WAIT_S, Party

from edgetrain.conditions import Conditions, Happening
from edgetrain.errors import TransportError
from edgetrain.sim.line import RETRANSMIT_S, Line
from edgetrain.sim.shaped import Bounds, ShapedTransport, behind_link
from edgetrain.sim.timetable import Timetable
from edgetrain.transport.base import Inbound
from edgetrain.transport.memory import MemoryHub, MemoryTransport
from edgetrain.wire.messages import Release, Train, encode
from edgetrain.wire.topics import Channel

RATE = 1000.0  # bytes/s
DATA, CONTROL = Channel.DATA, Channel.CONTROL


def line(seed: int = 0, *, started_s: float | None = None, **conditions) -> Line[str]:
    told = Conditions(link=RATE, **conditions)
    timetable = Timetable(told)
    if started_s is not None:
        timetable.start(started_s)
    return Line(told, timetable, np.random.Generator(np.random.PCG64(seed)))


def check(way: Line[str], expected: list[tuple[float, str]]) -> None:
    found = arrivals(way)
    assert [item for _, item in found] == [item for _, item in expected]
    assert [at_s for at_s, _ in found] == pytest.approx([at_s for at_s, _ in expected])


def arrivals(of: Line[str]) -> list[tuple[float, str]]:
    """Every message and when it arrives, asking at no other times."""
    found = []
    while (now_s := of.next_s()) < math.inf:
        found += [(now_s, item) for item, _ in of.due(now_s)]
    return found


def test_a_message_takes_its_bytes_then_the_latency():
    way = line(latency_s=0.5)
    way.put(10.0, DATA, "a", 100)
    way.put(10.0, DATA, "b", 200)  # waits for the link, not for a's latency
    way.put(20.0, DATA, "c", 100)  # the link was idle meanwhile and saved up nothing
    check(way, [(10.6, "a"), (10.8, "b"), (20.6, "c")])
    assert way.empty


def test_control_waits_for_one_frame_at_most():
    way = line()
    for i in range(3):
        way.put(0.0, DATA, f"frame{i}", 1000)
    assert way.due(0.5) == []  # the first frame is on the link
    way.put(0.5, CONTROL, "now", 100)
    check(way, [(1.0, "frame0"), (1.1, "now"), (2.1, "frame1"), (3.1, "frame2")])


def test_what_was_not_there_when_the_link_was_free_does_not_overtake():
    """Whenever it is asked: here only after both were put."""
    way = line()
    way.put(0.0, DATA, "data", 1000)
    way.put(0.9, CONTROL, "control", 100)
    check(way, [(1.0, "data"), (1.1, "control")])


def test_an_outage_holds_back_what_is_on_the_link_and_what_is_under_way():
    way = line(started_s=100.0, latency_s=0.5, timetable=(Happening(1.0, down_s=5.0),))
    way.put(100.2, DATA, "under way", 500)  # has left at 100.7, would arrive at 101.2
    way.put(100.2, DATA, "on the link", 400)  # 300 bytes before the outage, 100 after
    check(way, [(106.0, "under way"), (106.6, "on the link")])


def test_a_rate_changes_in_the_middle_of_a_message():
    slower = Happening(1.0, link=RATE * 2), Happening(2.0, link="unlimited")
    way = line(started_s=0.0, timetable=slower)
    way.put(0.0, DATA, "a", 2000)  # 1000 in the first second, 1000 in half of the next
    way.put(0.0, DATA, "b", 5000)  # 1000 more, then the rest at once
    check(way, [(1.5, "a"), (2.0, "b")])


def test_nothing_happens_before_the_start():
    way = line(timetable=(Happening(0.0, down_s=100.0), Happening(0.0, link=1e12)))
    way.put(0.0, DATA, "a", 1000)
    assert arrivals(way) == [(1.0, "a")]


def test_a_lost_message_comes_one_or_more_timeouts_later():
    delays = []
    for seed in range(60):
        way = line(seed, loss=0.5, latency_s=0.1)
        way.put(0.0, DATA, "a", 100)
        ((at_s, _),) = arrivals(way)
        delays.append(round(at_s - 0.2, 9))
    timeout_s = RETRANSMIT_S + 2 * 0.1
    times = [0.0, timeout_s, 3 * timeout_s, 7 * timeout_s, 15 * timeout_s]
    assert {d for d in delays if d < 6} <= {round(t, 9) for t in times}
    assert 20 <= delays.count(0.0) <= 40


def test_what_is_behind_a_lost_message_waits_for_it():
    way = line(3, loss=0.5, latency_s=0.1)
    for i in range(50):
        way.put(0.0, DATA, f"{i}", 10)
    way.put(0.0, CONTROL, "control", 10)  # has a connection of its own
    found = [item for _, item in arrivals(way)]
    found.remove("control")
    assert found == [f"{i}" for i in range(50)], "nothing is lost, nothing overtakes"


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.sampled_from([DATA, CONTROL]), st.integers(0, 900))
    ),
    st.integers(0, 99),
)
def test_laws_of_a_line(messages, seed):
    """Order within a channel, never faster than the link, the same for the same seed."""
    rates = (Happening(0.5, link=3 * RATE), Happening(1.0, down_s=0.5))
    runs = []
    for _ in range(2):
        way = line(
            seed, started_s=0.0, jitter_s=0.3, latency_s=0.1, loss=0.2, timetable=rates
        )
        for index, (at_s, channel, nbytes) in enumerate(
            sorted(messages, key=lambda m: m[0])
        ):
            way.put(at_s, channel, f"{channel} {index}", nbytes)
        runs.append(arrivals(way))
    assert runs[0] == runs[1]
    times = [at_s for at_s, _ in runs[0]]
    assert times == sorted(times)
    assert not any(1.0 <= at_s < 1.5 for at_s in times)
    for channel in Channel:
        indices = [int(i.split()[1]) for _, i in runs[0] if i.split()[0] == str(channel)]
        assert indices == sorted(indices)
    assert len(runs[0]) == len(messages)
    if messages:
        least_s = sum(nbytes for *_, nbytes in messages) / (3 * RATE)
        assert times[-1] >= min(at_s for at_s, *_ in messages) + least_s


def test_speed_follows_the_timetable_from_its_start():
    timetable = Timetable(
        Conditions(timetable=(Happening(20.0, speed=0.25), Happening(5.0, speed=0.5)))
    )
    assert timetable.speed(1e9) == 1
    timetable.start(100.0)
    timetable.start(200.0)  # later starts are other runs: it goes on
    assert [timetable.speed(100.0 + s) for s in (0, 4.9, 5, 19, 20, 99)] == [
        *(1, 1),
        *(0.5, 0.5),
        *(0.25, 0.25),
    ]


def shaped(hub: MemoryHub, name: str, conditions: Conditions, **kwargs) -> ShapedTransport:
    inner = MemoryTransport(hub, name)
    return ShapedTransport(inner, conditions, Timetable(conditions), **kwargs)


def test_what_needs_no_shaping_is_not_wrapped():
    inner = MemoryTransport(MemoryHub(), "a")
    for conditions in (Conditions(), Conditions(speed=0.5), Conditions(paced=(0.1, 0.2))):
        assert behind_link(inner, conditions, Timetable(conditions)) is inner


def test_a_sender_waits_while_its_window_is_full_and_fails_when_it_closes():
    """The clock stands still, so nothing ever leaves."""
    hub = MemoryHub()
    bounds = Bounds(window_bytes=1000, clock=lambda: 0.0)
    a = shaped(hub, "a", Conditions(link=1e3), bounds=bounds)
    a.open(lambda _: None)
    sent, ended = [], queue.SimpleQueue()

    def send() -> None:
        try:
            for _ in range(9):
                a.send("b", DATA, bytes(300))
                sent.append(300)
        except TransportError as error:
            ended.put(str(error))

    sender = threading.Thread(target=send)
    sender.start()
    a.send("b", CONTROL, b"has a window of its own")
    sender.join(0.05)
    assert len(sent) == 4  # the fourth entered below the limit, the fifth waits
    a.kill()
    assert "killed" in ended.get(timeout=WAIT_S)
    sender.join(WAIT_S)


def test_only_a_train_command_starts_the_timetable_and_it_may_kill():
    hub = MemoryHub()
    conditions = Conditions(timetable=(Happening(0.0, kill=True),))
    timetable, dead = Timetable(conditions), threading.Event()
    a = Party(
        ShapedTransport(MemoryTransport(hub, "a"), conditions, timetable, die=dead.set)
    )
    coordinator = Party(MemoryTransport(hub, "coordinator"))
    a.open(b"hello")
    coordinator.open()
    release, train = encode(Release(1, 0, "over")), encode(Train(1, 0, 5))
    for channel, payload in (
        (CONTROL, b"no message"),
        (CONTROL, release),
        (DATA, train),
    ):
        coordinator.transport.send("a", channel, payload)
        assert a.take().payload == payload
        assert not timetable.started
    coordinator.transport.send("a", CONTROL, train)
    assert a.take() == Inbound("coordinator", CONTROL, train)
    assert timetable.started
    assert dead.wait(WAIT_S)
    for party in (a, coordinator):
        party.transport.close()


def test_a_killed_device_is_gone_without_a_goodbye():
    hub = MemoryHub()
    watcher = Party(MemoryTransport(hub, "coordinator")).open(watch=True)
    a = Party(shaped(hub, "a", Conditions(timetable=(Happening(0.0, kill=True),))))
    a.open(b"hello")
    assert watcher.takes_presence() == ("a", b"hello")
    watcher.transport.send("a", CONTROL, encode(Train(1, 0, 5)))
    assert watcher.takes_presence() == ("a", b"")
    a.transport.close()
    watcher.transport.close()
