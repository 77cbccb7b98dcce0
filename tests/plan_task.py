"""A run to plan: a chain of dense layers, and devices that are only described."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from coordinator.job import Job, prepare
from coordinator.plan_run import planner_of
from coordinator.planning import Planner
from edgetrain.config import parse
from edgetrain.wire.hello import Hello
from tests.small_models import build, normal

WIDTH = 256
LAYERS = 8
CLASSES = 4


def chain() -> onnx.ModelProto:
    """LAYERS equal dense layers, each with a Relu, and a classifier."""
    nodes, weights, last = [], {}, "x"
    for n in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [last, f"w{n}"], [f"h{n}"]))
        nodes.append(helper.make_node("Relu", [f"h{n}"], [f"r{n}"]))
        weights[f"w{n}"] = normal(WIDTH, WIDTH, seed=n) / np.float32(WIDTH**0.5)
        last = f"r{n}"
    nodes.append(helper.make_node("MatMul", [last, "out"], ["y"]))
    weights["out"] = normal(WIDTH, CLASSES, seed=LAYERS)
    return build(nodes, [("x", ["N", WIDTH])], ["y"], weights)


def write_chain(folder: Path) -> None:
    rng = np.random.default_rng(0)
    onnx.save(chain(), folder / "chain.onnx")
    for name, count in (("train", 1024), ("eval", 64)):
        x = rng.standard_normal((count, WIDTH), np.float32)
        np.savez(folder / f"{name}.npz", x=x, labels=x[:, :CLASSES].argmax(1))


def chain_job(folder: Path, **sections: dict) -> Job:
    """The job of a run file with these sections beside the model's and the data's."""
    write_chain(folder)
    table = {
        "model": {"path": "chain.onnx"},
        "data": {"train": "train.npz", "eval": "eval.npz"},
        **sections,
    }
    table["train"] = {"batch_size": 64, **table.get("train", {})}
    return prepare(parse(table, folder=folder))


def hello(
    device: str, flop_per_s: float = 1e9, memory_bytes: int = 1 << 30, **more
) -> Hello:
    known = {"version": "1", "engine": "none", "providers": (), "gradient": "auto"}
    return Hello(
        device=device,
        session=device,
        memory_bytes=memory_bytes,
        flop_per_s=flop_per_s,
        cores=1,
        **(known | more),
    )


def planner(job: Job, *hellos: Hello) -> Planner:
    return planner_of(job, {h.device: h for h in hellos})
