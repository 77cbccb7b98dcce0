"""What a probe measures: the compiler's own graphs, the engine's settings, the link."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import make_probe_graphs
import msgspec
import pytest

from device_agent.equip import Limits, equip
from device_agent.link_probe import measure_link
from device_agent.measure import OVERHEADS, Measurement, measure, overheads
from device_agent.probe import cores
from device_agent.probe_command import Request, default_name, probe, table
from device_agent.probe_set import ProbeSet, load
from device_agent.thread_search import TRIALS, Threading, candidates, fewest
from device_agent.timing import LEAST, MOST, UPDATE_ELEMENTS, UPDATES, repeat, typical
from edgetrain.conditions import Conditions
from edgetrain.device_profile import Case, DeviceProfile
from edgetrain.errors import BundleError, ConfigError, EngineError, TransportError
from edgetrain.op_groups import OpGroup
from edgetrain.planner.latency_model import LatencyModel
from edgetrain.transport.base import Inbound
from edgetrain.transport.broker import Broker
from edgetrain.transport.memory import MemoryHub, MemoryTransport
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.topics import Channel

WHOLE = load()


def few() -> ProbeSet:
    """The cases that a measurement cannot do without, and one with all that there is."""
    kept = tuple(
        case
        for case in WHOLE.cases
        if (case.name, case.batch) in TRIALS
        or (case.name in OVERHEADS and case.batch == 1)
        or (case.name == "conv1x1 64-256 8x8" and case.batch == 8)
    )
    return ProbeSet(kept, WHOLE.graphs)


def short(**changes: object) -> Measurement:
    plan = Measurement("here", "now", time.perf_counter, lambda *_: None, case_s=0.0)
    return replace(plan, **changes)


def test_every_group_is_measured_at_several_batches():
    for group in OpGroup:
        batches = {case.batch for case in WHOLE.cases if case.group == group}
        assert batches == (set() if group is OpGroup.OPTIMIZER else {1, 8, 32})
    names = [
        (chain.name, batch) for chain in make_probe_graphs.CHAINS for batch in (1, 8, 32)
    ]
    assert [(case.name, case.batch) for case in WHOLE.cases] == names


@pytest.mark.parametrize(
    ("number", "batch"), [(0, 32), (2, 8), (6, 8), (11, 1), (18, 8), (27, 1)]
)
def test_the_graphs_are_what_the_compiler_makes(number, batch):
    """A part of what `scripts/make_probe_graphs.py --check` compares."""
    chain = make_probe_graphs.CHAINS[number]
    made = make_probe_graphs.probe_set([chain], [batch])
    (case,) = (c for c in WHOLE.cases if (c.name, c.batch) == (chain.name, batch))
    assert made.cases == (case,)
    assert made.graphs.items() <= WHOLE.graphs.items()


def test_cases_are_of_one_group_alone():
    for case in WHOLE.cases:
        assert case.amount.nodes >= 1
        assert case.manifests[0].cotangents_out == ("start",)


def test_damaged_graphs_are_refused():
    data = few().encode()
    for damaged in (b"", data[:-100], b"x" + data, data[:50] + b"\0" + data[51:]):
        with pytest.raises(BundleError, match="damaged"):
            ProbeSet.decode(damaged)
    swapped = msgspec.structs.replace(few(), graphs=dict.fromkeys(WHOLE.graphs, b"x"))
    with pytest.raises(BundleError, match="install edgetrain again"):
        ProbeSet.decode(swapped.encode())


def test_all_of_a_device_is_measured():
    told = []
    plan = short(progress=lambda share, what: told.append((share, what)))
    measured = measure(plan, few())
    profile = measured.profile
    assert len(profile.cases) == len(few().cases) + len(UPDATES) * len(UPDATE_ELEMENTS)
    assert profile.weights_as_inputs.keys() == {"dense", "convolution", "pointwise"}
    assert profile.link is None
    assert profile.device == "here"
    assert DeviceProfile.decode(profile.encode()) == profile
    assert LatencyModel.of(profile).rates.forward.groups.keys() >= {"dense", "optimizer"}
    assert [share for share, _ in told] == sorted(share for share, _ in told)
    assert told[-1] == (1.0, "done")
    assert set(measured.tried) == set(candidates(cores()))


def broken(*names: str) -> ProbeSet:
    """Of these cases the graphs are no graphs."""
    probes = few()
    hashes = {
        spec.sha256
        for case in probes.cases
        if case.name in names
        for manifest in case.manifests.values()
        for spec in manifest.all_graphs.values()
    }
    graphs = {k: b"none" if k in hashes else v for k, v in probes.graphs.items()}
    return ProbeSet(probes.cases, graphs)


def test_a_case_that_the_engine_does_not_run_is_left_out(caplog):
    profile = measure(short(threads=1), broken("conv1x1 64-256 8x8")).profile
    assert "conv1x1 64-256 8x8" not in {case.name for case in profile.cases}
    assert profile.weights_as_inputs.keys() == {"dense", "convolution"}
    assert "conv1x1 64-256 8x8 is left out" in caplog.text


def test_an_engine_that_runs_nothing_is_no_device():
    with pytest.raises(EngineError, match="simplest graphs"):
        measure(short(threads=1), broken(*OVERHEADS))


def test_given_threads_are_not_searched():
    measured = measure(short(threads=1), few())
    assert measured.tried == {Threading(1, False): 1.0}
    assert measured.profile.threads == 1


def test_a_link_is_measured_with_the_rest():
    transport = MemoryTransport(MemoryHub(), "here")
    measured = measure(short(threads=1, transport=transport), few())
    assert measured.profile.link is not None
    assert "ms to the broker" in table(measured)


def test_settings_that_are_tried():
    assert candidates(1) == [(1, False)]
    assert [str(s) for s in candidates(3)] == [
        "1 thread",
        "2 threads",
        "2 threads, spinning",
        "3 threads",
        "3 threads, spinning",
    ]
    assert {threads for threads, _ in candidates(64)} == {1, 2, 4, 8, 16, 32, 64}


def test_the_fewest_threads_within_a_few_per_cent_win():
    one, two, spins, four = (
        Threading(1, False),
        *(
            Threading(2, False),
            Threading(2, True),
            Threading(4, False),
        ),
    )
    assert fewest({one: 1.02, two: 1.0, spins: 1.01}) == one
    assert fewest({one: 1.5, two: 1.02, spins: 1.0, four: 1.0}) == two
    assert fewest({one: 1.5, two: 1.2, spins: 1.0, four: 0.99}) == spins
    assert fewest({one: 2.0, four: 1.0}) == four


def test_overheads_are_a_line_through_nodes_of_no_size():
    def case(name: str, nodes: int, seconds: float, batch: int = 1) -> Case:
        return Case(name, "elementwise", batch, 1, 1, nodes, seconds, seconds)

    one, many = case("1 node", 1, 3e-5), case("33 nodes", 33, 1.9e-4)
    larger = case("33 nodes", 33, 1.0, batch=8)
    run_s, node_s = overheads((larger, one, many))
    assert node_s == pytest.approx(5e-6)
    assert run_s == pytest.approx(2.5e-5)
    assert overheads((case("1 node", 1, 2e-5), case("33 nodes", 33, 1e-5)))[1] == 0


def test_a_typical_time_passes_over_the_slow_ones():
    assert typical([9.0, 1.0, 2.0, 8.0, 7.0]) == 2.0
    assert typical([3.0]) == 3.0


def test_times_are_taken_until_they_agree():
    """With a clock that moves by what is measured."""
    now = [0.0]

    def runs(*seconds: float):
        left = list(seconds)

        def run() -> tuple[float]:
            taken = left.pop(0) if left else 1.0
            now[0] += taken
            return (taken,)

        return run

    def clock() -> float:
        return now[0]

    assert len(repeat(runs(), clock, 10.0)) == 10
    assert len(repeat(runs(), clock, 1.0)) == LEAST
    disturbed = repeat(runs(5.0, 5.0, 1.0, 5.0, 5.0), clock, 10.0)
    assert len(disturbed) == 6
    assert typical([s for (s,) in disturbed]) == 1.0
    hopeless = repeat(runs(*[1.0, *[5.0] * 99]), clock, 10.0)
    assert len(hopeless) == 9
    assert len(repeat(runs(*[1e-9] * 1000), clock, 10.0)) == MOST


class Line:
    """A link of known latency and bandwidth, on a clock of its own.

    Messages take turns and the sender goes on at once; whoever looks at the clock has
    waited for what was sent before.
    """

    name = "here"

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._now_s = self._free_s = self._arrived_s = 0.0
        self._arriving = False
        self.closed = False

    def clock(self) -> float:
        if not self._arriving:
            self._now_s = max(self._now_s, self._arrived_s)
        return self._arrived_s if self._arriving else self._now_s

    def open(self, receive, **_: object) -> None:
        self._receive = receive

    def send(self, to: str, channel: Channel, payload: bytes) -> None:
        assert (to, channel) == (self.name, Channel.DATA)
        self._free_s = max(self._free_s, self._now_s) + len(payload) / self._bytes_per_s
        self._arrived_s = self._free_s + 2 * self._latency_s
        self._arriving = True
        self._receive(Inbound("other", channel, b"something else"))
        self._receive(Inbound(self.name, channel, bytes(payload)))
        self._arriving = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(2e-3, 1e7), (0.1, 1e5), (0, 1e9)])
def test_a_link_of_known_numbers_is_measured_as_such(latency_s, bytes_per_s):
    line = Line(latency_s, bytes_per_s)
    found = measure_link(line, clock=line.clock)
    assert found.latency_s == pytest.approx(latency_s, rel=0.05, abs=1e-4)
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    assert line.closed


def test_a_real_broker_is_measured(edgetrain_broker: Broker):
    """Messages of its own to an inbox that only this device reads."""
    transport = MqttTransport(edgetrain_broker.url, "here")
    found = measure_link(transport, clock=time.perf_counter, stream_s=0.1)
    assert found.latency_s < 1
    assert transport.traffic.sent_bytes[Channel.DATA] > 240 << 10


class Deaf(MemoryHub):
    """A broker whose rules let nothing through."""

    def route(self, *_: object) -> None:
        return


def test_a_broker_that_returns_nothing_is_named():
    transport = MemoryTransport(Deaf(), "here")
    with pytest.raises(TransportError, match=r"broker's rules .* own inbox"):
        measure_link(transport, clock=time.perf_counter, wait_s=0.05)


def test_a_probe_writes_what_an_agent_announces(tmp_path, capsys):
    path = tmp_path / "here.json"
    probe(Request("here", threads=1, out=path, as_json=True), few())
    facts = json.loads(capsys.readouterr().out)
    profile = DeviceProfile.load(path)
    assert msgspec.convert(facts["profile"], DeviceProfile) == profile
    assert list(tmp_path.iterdir()) == [path]
    hello = equip("here", Limits(profile=profile)).hello
    assert hello.profile == profile
    slow = equip(
        "here", Limits(profile=profile, conditions=Conditions(speed=0.5))
    ).hello.profile
    assert slow is not None
    assert slow.run_overhead_s == 2 * profile.run_overhead_s


def test_a_probe_prints_a_table(capsys):
    probe(Request("here", threads=1), few())
    text = capsys.readouterr().out
    for word in ("threads    1 thread", "us a node", "pointwise", "batch 32", "adam"):
        assert word in text


@pytest.mark.parametrize("change", [{"cores": 1000}, {"engine": "other 1"}, {"threads": 7}])
def test_the_profile_of_another_device_is_not_announced(change, caplog):
    profile = measure(short(threads=1), few()).profile
    other = msgspec.structs.replace(profile, **change)
    assert equip("here", Limits(1, profile=other)).hello.profile is None
    assert "not announced" in caplog.text


def test_an_agent_takes_the_threads_of_its_profile():
    profile = measure(short(threads=2), few()).profile
    chosen = equip("here", Limits(profile=profile))
    assert chosen.engine.threads == 2
    assert chosen.engine.spinning == profile.spinning
    assert equip("here", Limits(1, profile=profile)).engine.threads == 1
    assert equip("here", Limits()).engine.threads == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"name": "a b"}, "a device's name"),
        ({"threads": 0}, "1 or more"),
        ({"memory": "much"}, "not a size"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_at_once(change, word):
    with pytest.raises(ConfigError, match=word):
        probe(replace(Request("here"), **change), few())


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "here.json"):
        with pytest.raises(ConfigError, match="no file can be written there"):
            probe(Request("here", out=path), few())


def test_the_host_gives_a_name():
    assert 1 <= len(default_name()) <= 64
