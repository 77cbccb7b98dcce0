"""The virtual clock against the wall clock: the same fleets on both.

    python benchmarks/virtual_clock.py [--broker mosquitto] [--rounds 3] [--json FILE]

Agents are processes on a real broker, paced and behind shaped links; the rehearsal is of
the same conditions. Hop and op overheads are the broker's defaults; nothing is fitted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx
from efficiency import COLUMNS, MICROBATCHES, ROWS, WARM_UP_STEPS, chain, write_data

from coordinator.job import prepare
from coordinator.progress import SilentProgress
from coordinator.run_folder import METRICS_FILE, PLAN_FILE, read_metrics
from coordinator.session import Session, Watch
from edgetrain.conditions import Conditions
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, PlanConfig, RunConfig
from edgetrain.plan import Plan
from edgetrain.planner.timeline_case import NETWORKS, Case, TimedDevice, TimedStage
from edgetrain.sim.fleet import ProcessFleet, SimDevice
from edgetrain.sim.virtual import rehearse
from edgetrain.train_config import TrainConfig
from edgetrain.transport.broker import embedded_broker
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.topics import COORDINATOR

TENSOR_BYTES = 4 * ROWS * COLUMNS
STEPS = WARM_UP_STEPS + 12


@dataclass(frozen=True)
class Fleet:
    """One row."""

    name: str
    devices: tuple[SimDevice, ...]
    schedule: str


@dataclass(frozen=True)
class Row:
    """Seconds a step; `load` is the machine's highest."""

    fleet: str
    schedule: str
    virtual_s: float
    wall_s: float
    error: float
    load: float


def fleets() -> list[Fleet]:
    def device(index: int, t: float, **more: object) -> SimDevice:
        return SimDevice(f"device{index}", paced=(t, 2 * t), **more)  # type: ignore[arg-type]

    lan = {"link": "100 Mbit/s", "latency_s": 0.001}
    slow = {"link": "20 Mbit/s", "latency_s": 0.005}
    jittery = {**lan, "jitter_s": 0.004}
    return [
        Fleet("even, no links", tuple(device(i, 0.02) for i in range(3)), "1f1b-eager"),
        Fleet("even, 100 Mbit/s", tuple(device(i, 0.02, **lan) for i in range(3)), "1f1b"),
        Fleet(
            "uneven, 100 Mbit/s",
            tuple(device(i, t, **lan) for i, t in enumerate((0.03, 0.01, 0.02, 0.015))),
            "1f1b-eager",
        ),
        Fleet("even, 20 Mbit/s", tuple(device(i, 0.02, **slow) for i in range(3)), "1f1b"),
        Fleet(
            "one slow link",
            tuple(device(i, 0.02, **(slow if i == 1 else lan)) for i in range(3)),
            "1f1b-eager",
        ),
        Fleet(
            "even, 100 Mbit/s, jitter",
            tuple(device(i, 0.02, **jittery) for i in range(3)),
            "1f1b",
        ),
        Fleet("even, 100 Mbit/s", tuple(device(i, 0.02, **lan) for i in range(3)), "gpipe"),
    ]


def virtual_s(fleet: Fleet, order: Sequence[str], broker: str) -> float:
    """Rehearsed in the order of the plan; the last stage does both in its backward."""
    stages = []
    by_name = {device.name: device for device in fleet.devices}
    for index, name in enumerate(order):
        device = by_name[name]
        forward_s, backward_s = device.paced or (0.0, 0.0)
        if index == len(order) - 1:
            forward_s, backward_s = 0.0, forward_s + backward_s
        stages.append(
            TimedStage(
                device.name,
                forward_s,
                backward_s,
                output_bytes=TENSOR_BYTES,
                cotangent_bytes=TENSOR_BYTES,
            )
        )
    case = Case(
        tuple(stages),
        tuple(TimedDevice(device.name) for device in fleet.devices),
        fleet.schedule,
        MICROBATCHES,
        NETWORKS[broker],
        input_bytes=TENSOR_BYTES,
        label_bytes=8 * ROWS,
    )
    conditions = {
        device.name: Conditions(
            link=device.link,
            latency_s=device.latency_s,
            jitter_s=device.jitter_s,
            loss=device.loss,
        )
        for device in fleet.devices
    }
    return rehearse(case, conditions, STEPS).period_s(WARM_UP_STEPS, STEPS - 1)


def wall_s(fleet: Fleet, url: str, folder: Path) -> tuple[float, tuple[str, ...]]:
    """The median step of real agents, and which ran the stages."""
    count = len(fleet.devices)
    train = TrainConfig(
        steps=STEPS,
        eval_every=STEPS,
        batch_size=MICROBATCHES * ROWS,
        microbatches=MICROBATCHES,
        schedule=fleet.schedule,
        lr=1e-6,
    )
    config = RunConfig(
        ModelConfig(folder / f"chain{count}.onnx"),
        DataConfig(folder / "train.npz"),
        train,
        PlanConfig(cuts=tuple(f"cut{i}" for i in range(count - 1))),
        FleetConfig(devices=tuple(device.name for device in fleet.devices)),
    )
    session = Session(
        prepare(config), MqttTransport(url, COORDINATOR), Watch(SilentProgress())
    )
    with tempfile.TemporaryDirectory(dir=folder) as place:
        session.train(Path(place) / "run")
        steps, _ = read_metrics(Path(place) / "run" / METRICS_FILE)
        plan = Plan.decode((Path(place) / "run" / PLAN_FILE).read_bytes())
    ends_s = [step.seconds for step in steps[WARM_UP_STEPS - 1 :]]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(ends_s))
    return step_s, tuple(stage.device for stage in plan.stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--broker", default="mosquitto", choices=["mosquitto", "iotcore"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the agents, who inherit it
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as place,
        embedded_broker(kind=asked.broker) as broker,
    ):
        folder = Path(place)
        write_data(folder)
        for fleet in fleets():
            onnx.save(chain(len(fleet.devices)), folder / f"chain{len(fleet.devices)}.onnx")
            with ProcessFleet(broker.url, fleet.devices):
                found = [wall_s(fleet, broker.url, folder) for _ in range(asked.rounds)]
            order = found[0][1]
            expected_s = virtual_s(fleet, order, asked.broker)
            real_s = statistics.median(step_s for step_s, other in found if other == order)
            error = expected_s / real_s - 1.0
            load = os.getloadavg()[0]
            row = Row(fleet.name, fleet.schedule, expected_s, real_s, error, load)
            rows.append(row)
            print(
                f"{row.fleet:26} {row.schedule:10} virtual {row.virtual_s * 1e3:7.1f} ms"
                f"  wall {row.wall_s * 1e3:7.1f} ms  error {row.error:+.1%}"
                f"  load {load:.1f}",
                flush=True,
            )
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
