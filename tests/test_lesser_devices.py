"""Devices that are paced, throttled, far away or killed, in whole runs and alone."""

import re
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pytest
from small_task import blobs, run_table, two_layers

from edgetrain.config import parse
from edgetrain.errors import DeviceError
from edgetrain.manifest import GraphSpec, Port, Role
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.sim.device import MAX_OVERSHOOT_S, SlowedEngine
from edgetrain.sim.fleet import ProcessFleet, SimDevice
from edgetrain.transport.broker import Broker

FAR = {"link": "80 Mbit/s", "latency_s": 0.002, "jitter_s": 0.002, "loss": 0.001}


@pytest.fixture
def task(tmp_path: Path) -> dict:
    """A run table whose files are in the fixture's folder."""
    onnx.save(two_layers(), tmp_path / "m.onnx")
    np.savez(tmp_path / "train.npz", **blobs(96))
    np.savez(tmp_path / "eval.npz", **blobs(40, seed=1))
    return run_table()


class Clock:
    """Time goes on by sleeping, each time a little too long, and by computing."""

    def __init__(self, overshoot_s: float = 0.0, computing_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.name = "fake"
        self._overshoot_s = overshoot_s
        self._computing_s = computing_s

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self._overshoot_s

    def load(self, *_: object) -> "Clock":
        return self

    def holding(self, *_: object) -> "Clock":
        return self

    def run(self, _: object) -> dict:
        self.now_s += self._computing_s
        return {}


def spec(inputs: list[Role], outputs: list[Role]) -> GraphSpec:
    ports = [
        tuple(Port(f"{i}", role, f"{i}", "float32", (1,)) for i, role in enumerate(roles))
        for roles in (inputs, outputs)
    ]
    return GraphSpec(*ports, "")


FORWARD = spec([Role.ACTIVATION, Role.WEIGHT], [Role.ACTIVATION, Role.STASH])
BACKWARD = spec([Role.COTANGENT, Role.STASH], [Role.GRADIENT])
LOSS = spec([Role.ACTIVATION, Role.LABELS], [Role.LOSS, Role.GRADIENT, Role.COTANGENT])
EVALUATE = spec([Role.ACTIVATION, Role.LABELS], [Role.LOSS, Role.OUTPUT])


@pytest.mark.parametrize(
    ("graph", "seconds"), [(FORWARD, 0.1), (BACKWARD, 0.3), (LOSS, 0.4), (EVALUATE, 0.1)]
)
@pytest.mark.parametrize("speed", [1.0, 0.25])
def test_a_paced_run_takes_what_it_was_told(graph, seconds, speed):
    clock = Clock(computing_s=0.02)
    engine = SlowedEngine(
        clock, lambda: speed, paced=(0.1, 0.3), clock=clock, sleep=clock.sleep
    )
    for loaded in (engine.load(b"", graph, {}), engine.load(b"", graph, {}).holding({})):
        before_s = clock.now_s
        loaded.run({})
        assert clock.now_s - before_s == pytest.approx(seconds / speed)


def test_a_slowed_run_takes_as_much_longer_as_the_device_is_slower_then():
    clock, speeds = Clock(computing_s=0.02), iter([1.0, 0.5, 0.1])
    engine = SlowedEngine(clock, lambda: next(speeds), clock=clock, sleep=clock.sleep)
    loaded = engine.load(b"", FORWARD, {})
    ends = [loaded.run({}) or clock.now_s for _ in range(3)]
    assert np.diff([100.0, *ends]) == pytest.approx([0.02, 0.04, 0.2])


def test_what_a_sleep_overshoots_the_next_is_shorter_by():
    for overshoot_s, owed_s in ((5e-4, 5e-4), (0.05, MAX_OVERSHOOT_S)):
        clock = Clock(overshoot_s)
        engine = SlowedEngine(
            clock, lambda: 1.0, paced=(0.1, 0.3), clock=clock, sleep=clock.sleep
        )
        loaded = engine.load(b"", FORWARD, {})
        ends = [loaded.run({}) or clock.now_s for _ in range(4)]
        expected = [0.1 + overshoot_s] + [0.1 + overshoot_s - owed_s] * 3
        assert np.diff([100.0, *ends]) == pytest.approx(expected)


def test_far_and_paced_devices_reach_the_same_weights(edgetrain_fleet, task):
    task["plan"] = {"pin": {"first": "a"}}
    near = edgetrain_fleet([SimDevice("a"), SimDevice("b")]).train(task)
    away = {"at_s": 0.05, "down_s": 0.1}
    throttled = {"at_s": 0.0, "speed": 0.9}
    lesser = [
        SimDevice("a", timetable=[away], **FAR),
        SimDevice("b", timetable=[throttled]),
    ]
    far = edgetrain_fleet(lesser).train(task)
    paced = [SimDevice("a", paced=(1e-4, 2e-4), **FAR), SimDevice("b", paced=(0.0, 0.0))]
    assert far.model.read_bytes() == near.model.read_bytes()
    assert edgetrain_fleet(paced).train(task).model.read_bytes() == near.model.read_bytes()


@pytest.mark.parametrize("memory", [True, False])
def test_a_timetable_kills_an_agent_in_the_middle_of_a_run(edgetrain_fleet, task, memory):
    task["train"] = {**task["train"], "epochs": 100_000}
    doomed = SimDevice("b", timetable=[{"at_s": 0.1, "kill": True}])
    fleet = edgetrain_fleet([SimDevice("a"), doomed], memory=memory)
    with pytest.raises(DeviceError, match="'b': its connection ended during the run"):
        fleet.train(task)


def test_the_page_s_run_files_are_valid(tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "simulated-fleets.md").read_text()
    tables = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert len(tables) == 2
    for text in tables:
        files = {"model": {"path": "m.onnx"}, "data": {"train": "train.npz"}}
        config = parse({**files, **tomllib.loads(text)}, folder=tmp_path)
        assert all(SimDevice.of(device).name for device in config.fleet.simulate)


def test_a_run_file_describes_lesser_devices(task, tmp_path, edgetrain_broker: Broker):
    task["fleet"] = {
        "simulate": [
            {
                "name": "a",
                "paced": [0.001, 0.002],
                "timetable": [{"at_s": 1, "speed": 0.5}],
            },
            {"name": "b", "speed": 0.5, **FAR},
        ]
    }
    config = parse(task, folder=tmp_path)
    devices = [SimDevice.of(device) for device in config.fleet.simulate]
    assert devices[1].conditions.link_bytes_per_s == 10e6
    with ProcessFleet(edgetrain_broker.url, devices) as fleet:
        options = fleet._options(devices[0])
        assert "--paced=0.001,0.002" in options
        assert "--timetable=[{at_s = 1.0, speed = 0.5}]" in options
        assert not fleet.ended()


def test_what_a_run_waits_for_a_processor_is_not_slowed():
    """Of 5 s, 2 s were work: at half speed they are 4 s, and the 5 s are long enough."""
    wall, work, slept = iter([0.0, 5.0, 5.0]), iter([10.0, 12.0]), []
    engine = SlowedEngine(
        OnnxRuntimeEngine(),
        lambda: 0.5,
        clock=lambda: next(wall),
        work_clock=lambda: next(work),
        sleep=slept.append,
    )
    pace = engine._pace
    pace.hold(pace.begin(), None)
    assert slept == []
