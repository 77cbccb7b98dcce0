"""What of a schedule's speed a real pipeline reaches, when stage times are known.

    python benchmarks/efficiency.py [--brokers mosquitto,iotcore] [--stages 2,4,8]
        [--forward-ms 5,20] [--rounds 3] [--json FILE]

Agents are processes on a real broker, paced: each forward takes so long, each backward
twice as long, most of it asleep, so that two cores suffice for eight stages. 64 KB cross
each cut for each of 8 microbatches. The bound is the schedule's period with those times and
no communication at all, by simulation; the efficiency is that bound over the median time
of a step. Rounds of all schedules alternate.
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

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from coordinator.job import prepare
from coordinator.metrics import METRICS_FILE, read_metrics
from coordinator.progress import SilentProgress
from coordinator.session import Session
from coordinator.watch import Watch
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, PlanConfig, RunConfig
from edgetrain.schedules.table import SCHEDULES
from edgetrain.schedules.validate import Times, simulate
from edgetrain.sim.fleet import ProcessFleet, SimDevice
from edgetrain.train_config import TrainConfig
from edgetrain.transport.broker import embedded_broker
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.topics import COORDINATOR

MICROBATCHES = 8
ROWS, COLUMNS = 16, 1024  # 64 KB of float32
CLASSES = 10
WARM_UP_STEPS = 5
SECONDS_A_RUN = 6.0
MIN_STEPS = 10


@dataclass(frozen=True, slots=True)
class Row:
    """One cell: of all rounds.

    Attributes:
        bound_s: of a step without communication.
        step_s: measured, median of medians.
        efficiency, lowest, highest: bound over measured; of the rounds.
        load: of the machine, the highest in a round; 2 cores.
    """

    broker: str
    stages: int
    forward_s: float
    schedule: str
    bound_s: float
    step_s: float
    efficiency: float
    lowest: float
    highest: float
    load: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A fleet, and where its runs' files go."""

    broker: str
    url: str
    stages: int
    forward_s: float
    folder: Path

    @property
    def devices(self) -> list[SimDevice]:
        pace = (self.forward_s, 2 * self.forward_s)
        return [SimDevice(f"device{i}", paced=pace) for i in range(self.stages)]

    def bound_s(self, schedule: str) -> float:
        """The last stage does forward and backward in one graph, when both are due."""
        last, t = self.stages - 1, self.forward_s
        times = Times([t] * last + [0.0], [2 * t] * last + [3 * t], [0.0] * last)
        return simulate(SCHEDULES[schedule], MICROBATCHES, times).period_s

    def steps(self, schedule: str) -> int:
        return WARM_UP_STEPS + max(MIN_STEPS, int(SECONDS_A_RUN / self.bound_s(schedule)))

    def config(self, schedule: str) -> RunConfig:
        steps = self.steps(schedule)
        train = TrainConfig(
            steps=steps,
            eval_every=steps,
            batch_size=MICROBATCHES * ROWS,
            microbatches=MICROBATCHES,
            schedule=schedule,
            lr=1e-6,
        )
        return RunConfig(
            ModelConfig(self.folder / f"chain{self.stages}.onnx"),
            DataConfig(self.folder / "train.npz"),
            train,
            PlanConfig(cuts=tuple(f"cut{i}" for i in range(self.stages - 1))),
            FleetConfig(devices=tuple(device.name for device in self.devices)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--brokers", default="mosquitto,iotcore")
    parser.add_argument("--stages", default="2,4,8")
    parser.add_argument("--forward-ms", default="5,20")
    parser.add_argument("--schedules", default="1f1b-eager,1f1b,gpipe")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the agents, who inherit it
    rows: list[Row] = []
    schedules = options.schedules.split(",")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_data(folder)
        for kind in options.brokers.split(","):
            with embedded_broker(kind=kind) as broker:
                for stages in _numbers(options.stages):
                    onnx.save(chain(stages), folder / f"chain{stages}.onnx")
                    for ms in _numbers(options.forward_ms):
                        cell = Cell(kind, broker.url, stages, ms / 1e3, folder)
                        for row in measure(cell, schedules, options.rounds):
                            print(_line(row), flush=True)
                            rows.append(row)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def measure(cell: Cell, schedules: Sequence[str], rounds: int) -> list[Row]:
    """Alternate the schedules on a fleet that stays up meanwhile."""
    steps_s: dict[str, list[float]] = {schedule: [] for schedule in schedules}
    loads: dict[str, list[float]] = {schedule: [] for schedule in schedules}
    with ProcessFleet(cell.url, cell.devices):
        for _ in range(rounds):
            for schedule in schedules:
                steps_s[schedule].append(median_step_s(cell, schedule))
                loads[schedule].append(os.getloadavg()[0])
    return [
        _row(cell, schedule, steps_s[schedule], loads[schedule]) for schedule in schedules
    ]


def median_step_s(cell: Cell, schedule: str) -> float:
    job = prepare(cell.config(schedule))
    session = Session(job, MqttTransport(cell.url, COORDINATOR), Watch(SilentProgress()))
    with tempfile.TemporaryDirectory(dir=cell.folder) as place:
        session.train(Path(place) / "run")
        steps, _ = read_metrics(Path(place) / "run" / METRICS_FILE)
    ends_s = [step.seconds for step in steps[WARM_UP_STEPS - 1 :]]
    return statistics.median(b - a for a, b in itertools.pairwise(ends_s))


def chain(stages: int) -> onnx.ModelProto:
    """One weight a stage, elementwise; the last one is a linear layer."""
    nodes, weights = [], []
    rng = np.random.default_rng(0)
    tensor = "x"
    for i in range(stages - 1):
        scale = np.ones(COLUMNS, np.float32)
        weights.append(numpy_helper.from_array(scale, f"scale{i}"))
        nodes.append(helper.make_node("Mul", [tensor, f"scale{i}"], [f"cut{i}"]))
        tensor = f"cut{i}"
    dense = (rng.standard_normal((COLUMNS, CLASSES)) / COLUMNS).astype(np.float32)
    weights.append(numpy_helper.from_array(dense, "dense"))
    nodes.append(helper.make_node("MatMul", [tensor, "dense"], ["y"]))
    shape = ("batch", COLUMNS)
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", CLASSES))],
        weights,
    )
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10)


def write_data(folder: Path) -> None:
    rng = np.random.default_rng(1)
    samples = MICROBATCHES * ROWS
    np.savez(
        folder / "train.npz",
        x=rng.standard_normal((samples, COLUMNS)).astype(np.float32),
        labels=rng.integers(0, CLASSES, samples),
    )


def _row(cell: Cell, schedule: str, steps_s: list[float], loads: list[float]) -> Row:
    bound_s = cell.bound_s(schedule)
    shares = sorted(bound_s / step_s for step_s in steps_s)
    return Row(
        cell.broker,
        cell.stages,
        cell.forward_s,
        schedule,
        bound_s,
        statistics.median(steps_s),
        statistics.median(shares),
        shares[0],
        shares[-1],
        max(loads),
    )


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _line(row: Row) -> str:
    return (
        f"{row.broker:9}  {row.stages} stages  {row.forward_s * 1e3:3.0f} ms"
        f"  {row.schedule:10}  bound {row.bound_s * 1e3:6.1f} ms"
        f"  step {row.step_s * 1e3:6.1f} ms  efficiency {row.efficiency:.3f}"
        f" ({row.lowest:.3f} ... {row.highest:.3f})  load {row.load:.1f}"
    )


if __name__ == "__main__":
    main()
