"""What a pipeline over MQTT costs beside the same training in one process.

    python benchmarks/pipeline.py [--devices 1,2,3] [--batches 64] [--json FILE]

Trains a small CNN on digits. `pipeline` is a whole run: agents as processes, the embedded
broker, samples fed by the coordinator; its time is that from one committed step to
another, start-up and evaluation left out. `alone` is one process that takes the same
steps with the same graphs. Rounds of both alternate, and each ratio is of one round.
On a machine with fewer free cores than devices, the devices share them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx

from coordinator.demo_model import digits_model, write_digits
from coordinator.job import Job, prepare
from coordinator.metrics import METRICS_FILE, read_metrics
from coordinator.optimizer import optimizer_spec
from coordinator.progress import SilentProgress
from coordinator.session import Session
from coordinator.watch import Watch
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, PlanConfig, RunConfig
from edgetrain.manifest import Mode
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.stage import Stage
from edgetrain.samples import BatchOrder
from edgetrain.sim.fleet import ProcessFleet, SimDevice
from edgetrain.train_config import TrainConfig
from edgetrain.transport.broker import Broker, embedded_broker
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.topics import COORDINATOR

WARM_UP_STEPS = 10
# Between convolutions, which cost the most, or between them and the dense layers.
CUTS = {1: (), 2: ("relu1",), 3: ("relu1", "flat")}


@dataclass(frozen=True, slots=True)
class Row:
    """One fleet and batch size: medians over the rounds.

    Attributes:
        alone, pipeline: samples a second.
        ratio: of pipeline to alone, in the same round.
        sent_bytes: by all parties, a step.
        busy: of each device, the share of the run it computed.
    """

    devices: int
    batch: int
    microbatches: int
    alone: float
    pipeline: float
    ratio: float
    sent_bytes: int
    busy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained, how often, and where files go."""

    devices: int
    train: TrainConfig
    rounds: int
    folder: Path

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"device{i}" for i in range(self.devices))

    @property
    def config(self) -> RunConfig:
        return RunConfig(
            ModelConfig(self.folder / "digits.onnx"),
            DataConfig(self.folder / "train.npz"),
            self.train,
            PlanConfig(cuts=CUTS[self.devices]),
            FleetConfig(devices=self.names),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="1,2,3")
    parser.add_argument("--batches", default="64")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the agents, who inherit it
    rows = []
    with tempfile.TemporaryDirectory() as place, embedded_broker() as broker:
        folder = Path(place)
        write_digits(folder)
        onnx.save(digits_model(), folder / "digits.onnx")
        print(f"{os.cpu_count()} cores, {broker.kind}; samples/s, medians")
        for devices in _numbers(options.devices):
            for batch in _numbers(options.batches):
                train = TrainConfig(
                    steps=WARM_UP_STEPS + options.steps,
                    batch_size=batch,
                    microbatches=options.microbatches,
                    eval_every=WARM_UP_STEPS + options.steps,
                )
                row = measure(Case(devices, train, options.rounds, folder), broker)
                print(_line(row), flush=True)
                rows.append(row)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def measure(case: Case, broker: Broker) -> Row:
    """Alternate both ways to train, on a fleet that stays up meanwhile."""
    job = prepare(case.config)
    devices = [SimDevice(name) for name in case.names]
    with ProcessFleet(broker.url, devices):
        alone, runs = [], []
        for turn in range(case.rounds):
            alone.append(train_alone(job))
            out = case.folder / f"{case.devices}-{case.train.batch_size}-{turn}"
            runs.append(train_pipeline(job, broker.url, out))
    pipeline = [samples_per_s for samples_per_s, _, _ in runs]
    return Row(
        case.devices,
        case.train.batch_size,
        case.train.microbatch_count,
        statistics.median(alone),
        statistics.median(pipeline),
        statistics.median(p / a for p, a in zip(pipeline, alone, strict=True)),
        runs[-1][1],
        tuple(
            round(statistics.median(b), 3) for b in zip(*(r[2] for r in runs), strict=True)
        ),
    )


def train_alone(job: Job) -> float:
    """Samples a second of one stage that holds the whole model."""
    train = job.config.train
    (bundle,) = job.compile((), (Mode.VJP,))
    spec = optimizer_spec(train, train.steps or 0)
    stage = Stage(
        bundle, OnnxRuntimeEngine(), spec, microbatches=train.microbatch_count, seed=0
    )
    samples = job.data.train
    if samples is None or samples.labels is None or train.steps is None:
        raise SystemExit("the benchmark's own configuration is not complete")
    order = BatchOrder(
        len(samples), train.batch_size, train.microbatch_count, train.seed, train.shuffle
    )
    start_s = time.perf_counter()
    for step in range(train.steps):
        if step == WARM_UP_STEPS:
            start_s = time.perf_counter()
        for m in range(train.microbatch_count):
            rows = order.rows(step, m)
            stage.forward(Tick(step, m), samples.take(rows).inputs)
            stage.backward(Tick(step, m), {"labels": samples.labels[rows]})
        stage.update(step)
    seconds = time.perf_counter() - start_s
    return (train.steps - WARM_UP_STEPS) * train.batch_size / seconds


def train_pipeline(job: Job, url: str, out: Path) -> tuple[float, int, tuple[float, ...]]:
    """Samples a second, bytes a step, and the share each device was busy."""
    session = Session(job, MqttTransport(url, COORDINATOR), Watch(SilentProgress()))
    outcome = session.train(out)
    steps, _ = read_metrics(out / METRICS_FILE)
    timed = steps[WARM_UP_STEPS - 1 :]
    seconds = timed[-1].seconds - timed[0].seconds
    rate = (len(timed) - 1) * job.config.train.batch_size / seconds
    return rate, timed[-1].bytes_sent, tuple(row.busy for row in outcome.rows)


def _numbers(text: str) -> Sequence[int]:
    return [int(word) for word in text.split(",")]


def _line(row: Row) -> str:
    busy = " ".join(f"{share:.0%}" for share in row.busy)
    return (
        f"devices {row.devices}  batch {row.batch:4}  alone {row.alone:7.0f}"
        f"  pipeline {row.pipeline:7.0f}  ratio {row.ratio:5.2f}"
        f"  {row.sent_bytes / 1e3:7.0f} kB a step  busy {busy}"
    )


if __name__ == "__main__":
    main()
