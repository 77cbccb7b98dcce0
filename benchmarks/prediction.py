"""How far predicted step times are from measured ones, over unlike fleets and models.

    python benchmarks/prediction.py [--steps 24] [--only NAME,...] [--json FILE]

Each case is a whole run: slowed agents as processes with shaped links, a broker, and the
plan that the planner makes. Four times of a step are set side by side:

- `guessed`: by the plan before any device had a stage;
- `planned`: by the plan in force, once each device had timed its own stage;
- `virtual`: on the virtual clock, with each stage's time in the run itself;
- `measured`: between two steps, the median.

The devices are slowed so far that together they keep less than one core busy; run it on a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from networks import CLASSES, NETWORKS
from step import exported

from coordinator.comparison import REPLAY, STEP
from coordinator.plan_run import plan_run
from coordinator.progress import SilentProgress
from coordinator.train_command import Options, execute
from edgetrain.config import RunConfig, parse
from edgetrain.plan import Plan

FAST = "100 Mbit/s"
WIFI = "40 Mbit/s"


@dataclass(frozen=True, slots=True)
class Setting:
    """One fleet and model; `devices` as in a run file's [fleet] simulate."""

    network: str
    batch: int
    devices: tuple[dict, ...]
    plan: dict


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a step, and errors as shares of what was measured."""

    name: str
    stages: int
    schedule: str
    guessed_s: float
    planned_s: float
    virtual_s: float
    measured_s: float

    @property
    def errors(self) -> tuple[float, float, float]:
        predictions = (self.guessed_s, self.planned_s, self.virtual_s)
        return tuple(p / self.measured_s - 1 for p in predictions)


def device(name: str, speed: float, link: str = FAST, latency_s: float = 0.001) -> dict:
    return {"name": name, "speed": speed, "link": link, "latency_s": latency_s}


ALL = {"stages": "all"}
SETTINGS = {
    "mlp, 0.1 : 0.05": Setting("mlp", 128, (device("a", 0.1), device("b", 0.05)), ALL),
    "lenet, 3 alike": Setting("lenet", 64, tuple(device(n, 0.06) for n in "abc"), ALL),
    "encoder, latency": Setting(
        "encoder", 32, (device("a", 0.2, latency_s=0.01), device("b", 0.1)), ALL
    ),
    "resnet, 4 unlike": Setting(
        "resnet",
        32,
        (device("a", 0.2), device("b", 0.1), device("c", 0.2), device("d", 0.05)),
        ALL,
    ),
    "mobilenet, 1 : 1 : 0.1": Setting(
        "mobilenet", 32, (device("a", 0.3), device("b", 0.3), device("c", 0.03)), {}
    ),
    "unet, Wi-Fi": Setting(
        "unet", 16, (device("a", 0.3, WIFI, 0.003), device("b", 0.2, WIFI, 0.003)), ALL
    ),
    "gru, 2 alike": Setting("gru", 64, (device("a", 0.1), device("b", 0.1)), ALL),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", type=lambda text: text.split(";"), default=list(SETTINGS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.2f}")
    rows = [run(name, SETTINGS[name], options.steps) for name in options.only]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


def run(name: str, setting: Setting, steps: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        config = prepared(Path(folder), setting, steps)
        guess = plan_run(config, None).plan
        outcome = execute(config, Options(out=Path(folder, "run")), SilentProgress())
        plan = Plan.decode(Path(folder, "run", "plan.json").read_bytes())
    step = next(c for c in outcome.comparisons if c.what == STEP)
    replay = next(c for c in outcome.comparisons if c.what == REPLAY)
    row = Row(
        name,
        len(plan.stages),
        plan.schedule,
        guess.predicted_step_s,
        plan.predicted_step_s,
        replay.predicted,
        step.measured,
    )
    print(row, flush=True)
    return row


def prepared(folder: Path, setting: Setting, steps: int) -> RunConfig:
    network = NETWORKS[setting.network]
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    count = 4 * setting.batch
    x = rng.standard_normal((count, *network.shape)).astype(np.float32)
    np.savez(folder / "train.npz", x=x, labels=rng.integers(0, CLASSES, count))
    model = exported(network.make(), torch.from_numpy(x[: setting.batch]))
    onnx.save(model, folder / "model.onnx")
    table = {
        "model": {"path": "model.onnx"},
        "data": {"train": "train.npz"},
        "train": {"batch_size": setting.batch, "steps": steps, "lr": 1e-4},
        "plan": {"replan": False, **setting.plan},
        "fleet": {"simulate": list(setting.devices), "step_timeout_s": 120.0},
    }
    return parse(table, folder=folder)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| fleet and model | stages | schedule | measured | guessed | planned | virtual |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        errors = " | ".join(f"{error:+.1%}" for error in row.errors)
        lines.append(
            f"| {row.name} | {row.stages} | {row.schedule} | {1e3 * row.measured_s:.1f} ms"
            f" | {errors} |"
        )
    worst = [statistics.mean(abs(row.errors[i]) for row in rows) for i in range(3)]
    means = " | ".join(f"{error:.1%}" for error in worst)
    return "\n".join([*lines, f"| mean of the errors' sizes | | | | {means} |"])


if __name__ == "__main__":
    main()
