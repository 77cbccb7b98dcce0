"""A device becomes four times slower in mid-run: how soon the run moves, and what it gains.

    python benchmarks/drift.py [--rounds 3] [--json FILE]

Two slowed agents as processes train a net of 16 dense layers; after 2 s one of them is
throttled to a quarter. `moved` is that run. `stayed` is the same with [plan] replan off.
`optimum` is a run whose second device is as slow from the start, so that its plan is made
for it; all steps it has taken are counted once its plan has settled. Rounds of the three
alternate. The weights of `moved` are compared with those of an undisturbed run.
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
from onnx import TensorProto, helper, numpy_helper

from coordinator.metrics import METRICS_FILE, MoveMetrics, StepMetrics, read_lines
from coordinator.progress import SilentProgress
from coordinator.train_command import Options, execute
from edgetrain.compiler.normalise import normalise
from edgetrain.config import parse
from edgetrain.plan import Plan

WIDTH, LAYERS, CLASSES, BATCH = 384, 16, 10, 128
SPEED, SLOWER = 0.2, 0.05
THROTTLED_AT_S = 2.0
STEPS = 120
TAIL = 30  # steps at the end that a rate is taken of


@dataclass(frozen=True, slots=True)
class Round:
    """One round.

    Attributes:
        steps_to_move: between the first slow step and the first move after it.
        layers: of each stage, in pipeline order: moved, and optimum.
        pause_s: of all moves together.
        before, stayed, moved, optimum: samples a second.
        error: of the weights, the largest relative difference of a tensor.
    """

    steps_to_move: int
    layers: str
    pause_s: float
    before: float
    stayed: float
    moved: float
    optimum: float
    error: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.2f}")
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(one_round(Path(folder)))
        print(rounds[-1], flush=True)
    print(table(rounds))
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rounds], indent=2))


def one_round(folder: Path) -> Round:
    onnx.save(chain(), folder / "chain.onnx")
    x = np.random.default_rng(0).standard_normal((8 * BATCH, WIDTH)).astype(np.float32)
    np.savez(folder / "train.npz", x=x, labels=x[:, :CLASSES].argmax(1))
    throttle = [{"at_s": THROTTLED_AT_S, "speed": SLOWER}]
    moved = train(folder, "moved", SPEED, throttle)
    stayed = train(folder, "stayed", SPEED, throttle, replan=False)
    optimum = train(folder, "optimum", SLOWER, [])
    calm = train(folder, "calm", SPEED, [])
    moves = read_lines(moved / METRICS_FILE, MoveMetrics)
    seconds = step_seconds(moved)
    ends = np.cumsum(seconds)
    slow = int(np.searchsorted(ends, THROTTLED_AT_S)) + 1
    later = [move for move in moves if move.step > slow]
    return Round(
        min((move.step for move in later), default=STEPS) - slow,
        f"{layers(moved)} / {layers(optimum)}",
        sum(move.pause_s for move in later),
        BATCH / statistics.median(seconds[2 : slow - 1]),
        rate(stayed),
        rate(moved),
        rate(optimum),
        error(moved, calm),
    )


def train(
    folder: Path, name: str, speed: float, timetable: list[dict], *, replan: bool = True
) -> Path:
    devices = [
        {"name": "steady", "speed": SPEED},
        {"name": "warm", "speed": speed, "timetable": timetable},
    ]
    table = {
        "model": {"path": "chain.onnx"},
        "data": {"train": "train.npz"},
        "train": {"batch_size": BATCH, "steps": STEPS, "lr": 0.002, "microbatches": 8},
        "plan": {"stages": "all", "replan": replan},
        "fleet": {"simulate": devices},
    }
    config = parse(table, folder=folder)
    return execute(config, Options(out=folder / name), SilentProgress()).folder


def chain() -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    nodes, weights, last = [], [], "x"
    for n in range(LAYERS):
        w = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) * (2 / WIDTH) ** 0.5
        weights.append(numpy_helper.from_array(w, f"w{n}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{n}"], [f"h{n}"]))
        nodes.append(helper.make_node("Relu", [f"h{n}"], [f"r{n}"]))
        last = f"r{n}"
    w = rng.standard_normal((WIDTH, CLASSES)).astype(np.float32) / WIDTH**0.5
    weights.append(numpy_helper.from_array(w, "out"))
    nodes.append(helper.make_node("MatMul", [last, "out"], ["y"]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", WIDTH])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", CLASSES])
    graph = helper.make_graph(nodes, "chain", [x], [y], weights)
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10)


def step_seconds(folder: Path) -> list[float]:
    ends = [line.seconds for line in read_lines(folder / METRICS_FILE, StepMetrics)]
    return [ends[0], *np.diff(ends).tolist()]


def layers(folder: Path) -> str:
    """Such as ``steady 13 + warm 4``."""
    plan = Plan.decode((folder / "plan.json").read_bytes())
    return " + ".join(f"{stage.device} {stage.layers}" for stage in plan.stages)


def rate(folder: Path) -> float:
    return BATCH / statistics.median(step_seconds(folder)[-TAIL:])


def error(folder: Path, other: Path) -> float:
    a, b = (
        normalise(onnx.load(each / "trained.onnx"), batch=1).weights
        for each in (folder, other)
    )
    return max(
        float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in b
    )


def table(rounds: Sequence[Round]) -> str:
    lines = [
        "| steps | layers | paused | before | stayed | moved | optimum | ratio | error |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rounds:
        rates = " | ".join(f"{x:.0f}" for x in (r.before, r.stayed, r.moved, r.optimum))
        lines.append(
            f"| {r.steps_to_move} | {r.layers} | {r.pause_s:.2f} s | {rates}"
            f" | {r.moved / r.optimum:.2f} | {r.error:.1e} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
