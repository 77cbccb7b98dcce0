"""Fleets of real agents as threads and as processes, and the fixtures users get."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from small_task import blobs, run_table, split_password, two_layers

from coordinator.figures import Snapshot
from coordinator.fleet import Fleet, Gone
from coordinator.progress import SilentProgress
from coordinator.session import train
from coordinator.watch import Watch
from edgetrain.config import parse
from edgetrain.errors import ConfigError, DeviceError, FleetError, PlanError
from edgetrain.sim.fleet import ProcessFleet, SimDevice, ThreadFleet
from edgetrain.transport.broker import Broker
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.memory import MemoryHub, MemoryTransport
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.topics import COORDINATOR

REFUSED_BYTES = 4300  # the planner's estimate of the small task fits, its graphs do not
WAIT_S = 30.0  # only a failing test waits this long


@pytest.fixture
def task(tmp_path: Path) -> dict:
    """A run table whose files are in the fixture's folder."""
    onnx.save(two_layers(), tmp_path / "m.onnx")
    np.savez(tmp_path / "train.npz", **blobs(96))
    np.savez(tmp_path / "eval.npz", **blobs(40, seed=1))
    return run_table()


@pytest.mark.parametrize("memory", [True, False])
def test_the_fixture_trains_on_threads_and_on_processes(edgetrain_fleet, task, memory):
    fleet = edgetrain_fleet([SimDevice("a"), SimDevice("b")], memory=memory)
    outcome = fleet.train(task)
    assert outcome.steps == 18
    assert outcome.score.accuracy > 0.9
    assert {row.device for row in outcome.rows} == {"a", "b"}


def test_threads_and_processes_reach_the_same_weights(edgetrain_fleet, task):
    devices = [SimDevice("a"), SimDevice("b")]
    task["plan"]["pin"] = {"first": "a"}
    files = [edgetrain_fleet(devices, memory=m).train(task).model for m in (True, False)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_fleet_trains_twice(edgetrain_fleet, task):
    fleet = edgetrain_fleet([SimDevice("a")])
    first, second = fleet.train(task), fleet.train(task)
    assert first.folder != second.folder
    assert first.model.read_bytes() == second.model.read_bytes()


def test_samples_stay_on_the_device_that_has_them(task, tmp_path):
    seen = []
    hub = MemoryHub(tap=lambda *message: seen.append(message))
    files = (tmp_path / "train.npz", tmp_path / "eval.npz")
    devices = [SimDevice("a", datasets={"blobs": files}), SimDevice("b")]
    task["data"] = {"device": "a", "dataset": "blobs"}
    task["fleet"] = {"devices": ["a", "b"]}
    config = parse(task, folder=tmp_path)
    with ThreadFleet(lambda name: MemoryTransport(hub, name), devices):
        transport = MemoryTransport(hub, COORDINATOR)
        outcome = train(config, transport, Watch(SilentProgress()), tmp_path / "run")
    assert outcome.score.accuracy > 0.9
    samples = [sample.tobytes() for sample in blobs(96)["x"]]
    payloads = [bytes(payload) for *_, payload in seen]
    assert payloads
    assert not any(sample in payload for sample in samples for payload in payloads)


def test_a_device_that_lends_too_little_memory_is_named(edgetrain_fleet, task):
    fleet = edgetrain_fleet([SimDevice("tiny", memory_bytes=1000)])
    with pytest.raises(PlanError, match="'tiny' is short by"):
        fleet.train(task)


def test_a_device_that_refuses_ends_the_run_with_its_reason(edgetrain_fleet, task):
    fleet = edgetrain_fleet([SimDevice("small", memory_bytes=REFUSED_BYTES)])
    with pytest.raises(DeviceError, match="'small': refuses stage 0: the stage needs"):
        fleet.train(task)


def test_a_device_that_dies_ends_the_run_with_its_name(task, tmp_path):
    hub = MemoryHub()
    devices = [SimDevice("a"), SimDevice("b")]
    task["fleet"] = {"devices": ["a", "b"]}
    with ThreadFleet(lambda name: MemoryTransport(hub, name), devices) as agents:

        class Fault(SilentProgress):
            def update(self, snapshot: Snapshot) -> None:
                if snapshot.step == 3:
                    agents.kill("b")

        way = MemoryTransport(hub, COORDINATOR)
        with pytest.raises(DeviceError, match="'b': its connection ended"):
            train(parse(task, folder=tmp_path), way, Watch(Fault()), tmp_path / "run")


def test_a_killed_thread_is_gone_for_the_coordinator():
    hub = MemoryHub()
    with ThreadFleet(lambda name: MemoryTransport(hub, name), [SimDevice("a")]) as agents:
        fleet = watching(MemoryTransport(hub, COORDINATOR), ["a"])
        agents.kill("a")
        assert fleet.event(WAIT_S) == Gone("a")
        fleet.close()


def test_two_agents_of_one_name_are_noticed():
    hub = MemoryHub()
    fleet = Fleet(MemoryTransport(hub, COORDINATOR))
    fleet.open()
    twins = [
        ThreadFleet(lambda name: MemoryTransport(hub, name), [SimDevice("a")])
        for _ in range(2)
    ]
    with twins[0]:
        fleet.wait(["a"], 1, WAIT_S)
        with twins[1], pytest.raises(FleetError, match="two agents are named 'a'"):
            fleet.settled(quiet_s=2.0)
    fleet.close()


def test_a_killed_process_is_gone_and_its_log_stays(edgetrain_broker: Broker):
    with ProcessFleet(edgetrain_broker.url, [SimDevice("a")], "killed") as agents:
        fleet = watching(transport(edgetrain_broker, "killed"), ["a"])
        agents.kill("a")
        assert fleet.event(WAIT_S) == Gone("a")
        fleet.close()
        assert "ready" in agents.logs("a")
        assert list(agents.ended()) == ["a"]


def test_the_password_is_on_no_command_line(edgetrain_broker: Broker):
    _, password = split_password(edgetrain_broker.url)
    with ProcessFleet(edgetrain_broker.url, [SimDevice("a")], "secret") as agents:
        command = Path(f"/proc/{agents.pid('a')}/cmdline")
        eventually(lambda: b"--name=a" in command.read_bytes())
        assert password.encode() not in command.read_bytes()


def test_processes_end_with_their_fleet(edgetrain_broker: Broker):
    with ProcessFleet(edgetrain_broker.url, [SimDevice("a")], "ends") as agents:
        pid = agents.pid("a")
        assert alive(pid)
    assert not alive(pid)


def test_processes_end_when_their_parent_is_killed(edgetrain_broker: Broker, tmp_path):
    script = (
        "import sys, time\n"
        "from edgetrain.sim.fleet import ProcessFleet, SimDevice\n"
        f"with ProcessFleet({edgetrain_broker.url!r}, [SimDevice('a')], 'orphan') as f:\n"
        "    print(f.pid('a'), flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    eventually(lambda: not alive(pid))


def test_two_devices_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="a twice"):
        ProcessFleet("mqtt://localhost", [SimDevice("a"), SimDevice("a")])


def test_the_plugin_costs_other_peoples_tests_nothing():
    script = (
        "import sys, edgetrain.sim.pytest_plugin\n"
        "print([m for m in sys.modules if m.split('.')[0] in"
        " {'onnx', 'onnxruntime', 'numpy', 'coordinator', 'device_agent', 'paho'}])\n"
    )
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def transport(broker: Broker, namespace: str) -> MqttTransport:
    return MqttTransport(
        broker.url, COORDINATOR, settings=MqttSettings(namespace=namespace)
    )


def watching(way, names: list[str]) -> Fleet:
    fleet = Fleet(way)
    fleet.open()
    fleet.wait(names, len(names), WAIT_S)
    return fleet


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    return status.rpartition(")")[2].split()[0] != "Z"


def eventually(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)
