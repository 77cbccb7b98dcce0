"""Two fast devices and one a tenth as fast: the planned cut beside an even one.

    python benchmarks/uneven.py [--steps 8] [--rounds 3] [--json FILE]

MobileNetV2 in its 20 units (a stem, 17 inverted residuals, a last convolution, a
classifier) on batches of 128, the setting of Chen et al., FTPipeHD (2021). Agents are real
processes on a broker, slowed by sleeping, all of them so far that two cores suffice;
speeds are as 1 : 1 : 0.1. `even` gives each device as many units, the slow one the last.
`best` is the fastest of all cuts between units on the devices in any order, tried one by
one in simulation; `planned` is what the planner makes of it, which may cut inside units.
Step times are measured, and simulated from the times of the same stages in this process,
one at a time, over their devices' speeds.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
import onnx
import torch
from networks import InvertedResidual, conv_norm
from torch import nn

from coordinator.job import Job, Means, prepare
from coordinator.metrics import METRICS_FILE, read_metrics
from coordinator.optimizer import optimizer_spec
from coordinator.progress import SilentProgress
from coordinator.run_folder import PLAN_FILE
from coordinator.session import Session
from coordinator.watch import Watch
from edgetrain.bundle import Bundle
from edgetrain.compiler.cut import CutFinder
from edgetrain.config import (
    DataConfig,
    FleetConfig,
    ModelConfig,
    RunConfig,
)
from edgetrain.manifest import Mode
from edgetrain.plan_config import PinConfig, PlanConfig
from edgetrain.runtime.choice import choose
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.runtime.stage import Stage, Timing
from edgetrain.schedules.table import SCHEDULES
from edgetrain.schedules.validate import Times, simulate
from edgetrain.sim.fleet import ProcessFleet, SimDevice
from edgetrain.train_config import TrainConfig
from edgetrain.transport.broker import embedded_broker
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.wire.topics import COORDINATOR

# Expansion, channels, repetitions and first stride of each group of residuals.
GROUPS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
CLASSES = 10
SIDE = 32
BATCH = 128
FULL_SPEED = 0.25  # of this machine's, so that nothing waits for a core
SPEEDS = {"fast0": 1.0, "fast1": 1.0, "slow": 0.1}
WARM_UP_STEPS = 2
HOP_S = 1e-3  # over a broker on this machine, about
TRIES = 5


@dataclass(frozen=True, slots=True)
class Result:
    """One way to cut.

    Attributes:
        layers, devices: of the stages, in order.
        simulated_s, measured_s: of a step.
    """

    cut: str
    devices: tuple[str, ...]
    layers: tuple[int, ...]
    simulated_s: float
    measured_s: float


class Pooled(nn.Module):
    """Global average, then a linear layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mean((2, 3)))


class MobileNetV2(nn.Module):
    """The published network, narrower, as a chain of its 20 units."""

    def __init__(self, width: float) -> None:
        super().__init__()
        inputs = round(32 * width)
        stem = nn.Sequential(conv_norm(3, inputs, 3, 2), nn.ReLU6())
        units: list[nn.Module] = [stem]
        for expansion, channels, repetitions, stride in GROUPS:
            outputs = round(channels * width)
            for index in range(repetitions):
                first = stride if index == 0 else 1
                units.append(InvertedResidual(inputs, outputs, first, expansion))
                inputs = outputs
        last = round(1280 * width)
        units.append(nn.Sequential(conv_norm(inputs, last, 1), nn.ReLU6()))
        self.units = nn.Sequential(*units, Pooled(last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.units(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=float, default=0.5)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the agents, who inherit it
    torch.manual_seed(0)
    devices = [SimDevice(name, FULL_SPEED * speed) for name, speed in SPEEDS.items()]
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as place, embedded_broker() as broker:
        folder = Path(place)
        ends = write_model(folder / "model.onnx", options.width)
        write_data(folder / "train.npz")
        train = TrainConfig(
            steps=WARM_UP_STEPS + options.steps,
            eval_every=WARM_UP_STEPS + options.steps,
            batch_size=BATCH,
            schedule="1f1b-eager",
            microbatches=options.microbatches,
        )
        base = RunConfig(
            ModelConfig(folder / "model.onnx"),
            DataConfig(folder / "train.npz"),
            train,
            PlanConfig(stages="all", replan=False),
            FleetConfig(devices=tuple(SPEEDS), step_timeout_s=300.0),
        )
        units = Units.measure(prepare(base), ends)
        plans = {
            "even": cut_at(ends, tuple(SPEEDS), even(len(ends))),
            "best": cut_at(ends, *units.best()),
            "planned": PlanConfig(stages="all", replan=False),
        }
        with ProcessFleet(broker.url, devices):
            for turn, cut in itertools.product(range(options.rounds), plans):
                config = msgspec.structs.replace(base, plan=plans[cut])
                results.append(run(cut, config, broker.url, folder / f"{cut}{turn}"))
                print(_line(results[-1]), flush=True)
    for cut, kind in itertools.product(("best", "planned"), ("simulated_s", "measured_s")):
        print(f"even / {cut}, {kind}: {_ratio(results, cut, kind):.2f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1))


def even(units: int) -> tuple[int, int, int]:
    third = round(units / 3)
    return third, third, units - 2 * third


def cut_at(
    ends: Sequence[str], devices: tuple[str, ...], sizes: tuple[int, ...]
) -> PlanConfig:
    """So many units for each of these devices, in this order."""
    cuts = tuple(ends[stop - 1] for stop in itertools.accumulate(sizes[:-1]))
    return PlanConfig(cuts=cuts, pin=PinConfig(first=devices[0], last=devices[-1]))


def run(cut: str, config: RunConfig, url: str, out: Path) -> Result:
    job = prepare(config)
    Session(job, MqttTransport(url, COORDINATOR), Watch(SilentProgress())).train(out)
    plan = json.loads((out / PLAN_FILE).read_text())
    steps, _ = read_metrics(out / METRICS_FILE)
    ends_s = [step.seconds for step in steps[WARM_UP_STEPS - 1 :]]
    devices = tuple(stage["device"] for stage in plan["stages"])
    return Result(
        cut,
        devices,
        tuple(stage["layers"] for stage in plan["stages"]),
        simulated_s(job, devices, [tuple(stage["cut"]) for stage in plan["stages"][:-1]]),
        statistics.median(b - a for a, b in itertools.pairwise(ends_s)),
    )


@dataclass(frozen=True, slots=True)
class Units:
    """The times of the model's units at full speed, each measured alone as a stage."""

    times: Sequence[Timing]
    schedule: str
    microbatches: int

    @classmethod
    def measure(cls, job: Job, ends: Sequence[str]) -> Units:
        train = job.config.train
        times = stage_times(job, [(name,) for name in ends[:-1]])
        return cls(times, train.schedule, train.microbatch_count)

    def step_s(self, devices: Sequence[str], sizes: Sequence[int]) -> float:
        """By simulation, with so many units a device."""
        starts = list(itertools.accumulate(sizes, initial=0))
        forward_s, backward_s = [], []
        for device, first, end in zip(devices, starts, starts[1:], strict=False):
            speed = FULL_SPEED * SPEEDS[device]
            forward_s.append(sum(t.forward_s for t in self.times[first:end]) / speed)
            backward_s.append(sum(t.backward_s for t in self.times[first:end]) / speed)
        return _period_s(self.schedule, self.microbatches, forward_s, backward_s)

    def best(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Of all devices in all orders with all cuts, by exhaustion."""
        return min(
            ((o, s) for o in itertools.permutations(SPEEDS) for s in self._sizes()),
            key=lambda way: self.step_s(*way),
        )

    def _sizes(self) -> Iterator[tuple[int, ...]]:
        count = len(self.times)
        for first, second in itertools.combinations(range(1, count), 2):
            yield first, second - first, count - second


def stage_times(job: Job, cuts: Sequence[tuple[str, ...]]) -> list[Timing]:
    """Of each stage in this process, the best of a few; cuts by the tensors that cross."""
    engine, train = OnnxRuntimeEngine(), job.config.train
    finder = CutFinder(job.program, frozenset(job.trainable))
    wide = {tuple(spec.name for spec in cut.crossing): cut for cut in finder.valid()}
    count = len(cuts) + 1
    bundles = job.compile(
        tuple(wide.get(names) or finder.named(names[0]) for names in cuts),
        (Mode.VJP,) * count,
        Means(blocks=(engine.block,) * count),
    )
    spec = optimizer_spec(train, 1)

    def make(bundle: Bundle) -> Stage:
        microbatches = train.microbatch_count
        return Stage(bundle, engine, spec, microbatches=microbatches, seed=0)

    def best(bundle: Bundle) -> Timing:
        found = [choose(bundle, engine.block, make)[1] for _ in range(TRIES)]
        return Timing(min(t.forward_s for t in found), min(t.backward_s for t in found))

    return [best(bundle) for bundle in bundles]


def simulated_s(job: Job, devices: Sequence[str], cuts: Sequence[tuple[str, ...]]) -> float:
    """One step of these very stages."""
    timings = stage_times(job, cuts)
    speeds = [FULL_SPEED * SPEEDS[device] for device in devices]
    return _period_s(
        job.config.train.schedule,
        job.config.train.microbatch_count,
        [t.forward_s / speed for t, speed in zip(timings, speeds, strict=True)],
        [t.backward_s / speed for t, speed in zip(timings, speeds, strict=True)],
    )


def _period_s(
    schedule: str,
    microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
) -> float:
    times = Times(forward_s, backward_s, [HOP_S] * (len(forward_s) - 1))
    return simulate(SCHEDULES[schedule], microbatches, times).period_s


def write_model(path: Path, width: float) -> list[str]:
    """Export the network; return the tensors at the ends of its units."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            MobileNetV2(width).eval(),
            (torch.zeros(1, 3, SIDE, SIDE),),
            buffer,
            dynamo=False,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
        )
    model = onnx.load_from_string(buffer.getvalue())
    onnx.save(model, path)
    ends: dict[str, str] = {}
    for node in model.graph.node:
        scope = node.name.split("/")
        if len(scope) > 2 and scope[1] == "units":
            ends[scope[2]] = node.output[0]
    return list(ends.values())


def write_data(path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, 3, SIDE, SIDE)).astype(np.float32)
    np.savez(path, x=x, labels=rng.integers(0, CLASSES, BATCH))


def _ratio(results: list[Result], cut: str, kind: str) -> float:
    even_s, other_s = (
        statistics.median(getattr(r, kind) for r in results if r.cut == name)
        for name in ("even", cut)
    )
    return even_s / other_s


def _line(result: Result) -> str:
    stages = ", ".join(
        f"{d} {n}" for d, n in zip(result.devices, result.layers, strict=True)
    )
    return (
        f"{result.cut:8} layers: {stages:32} step simulated {result.simulated_s:7.3f} s,"
        f" measured {result.measured_s:7.3f} s"
    )


if __name__ == "__main__":
    main()
