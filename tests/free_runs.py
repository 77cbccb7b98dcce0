"""Runs of the tasks of `free_tasks.py`, and what their models get right.

``python tests/free_runs.py [TASK ...]`` prints each task's accuracy before and after
training with exact gradients, which others are compared with.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
from free_data import Samples
from free_tasks import TASKS, Task
from training import train

from coordinator.run_folder import MODEL_FILE
from edgetrain.compiler import reference
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, PlanConfig, RunConfig
from edgetrain.estimator_spec import DEFAULT, EstimatorSpec
from edgetrain.sim.fleet import SimDevice


def accuracy(model: onnx.ModelProto, samples: Samples) -> float:
    """The share that a model gets right."""
    logits = reference.run(model, {"x": samples.x})["logits"]
    return float((logits.argmax(1) == samples.labels).mean())


def run_config(  # noqa: PLR0913 - each with a default
    task: Task,
    folder: Path,
    cuts: Sequence[str],
    estimator: EstimatorSpec = DEFAULT,
    trainable: str | None = "all",
    source: Samples | None = None,
    **changes: object,
) -> RunConfig:
    """A run of it with those cuts; `changes` are of the recipe.

    The model and the data are written into the folder; `source`, if heads are to learn from
    it first.
    """
    onnx.save(task.model, folder / "model.onnx")
    sets = {"train": task.train, "eval": task.eval}
    sets |= {"source": source} if source is not None else {}
    for name, samples in sets.items():
        np.savez(folder / f"{name}.npz", x=samples.x, labels=samples.labels)
    known = folder / "source.npz" if source is not None else None
    return RunConfig(
        ModelConfig(folder / "model.onnx", trainable=trainable, source=known),
        DataConfig(folder / "train.npz", folder / "eval.npz"),
        msgspec.structs.replace(task.recipe, **changes),
        PlanConfig(cuts=tuple(cuts)),
        FleetConfig(devices=len(cuts) + 1),
        estimator,
    )


def trained(
    task: Task,
    folder: Path,
    cuts: Sequence[str] = (),
    gradient: Sequence[str] = (),
    estimator: EstimatorSpec = DEFAULT,
    **changes: object,
) -> float:
    """Accuracy on `eval` after a run on one device a stage, with their gradient modes."""
    folder.mkdir(parents=True, exist_ok=True)
    modes = gradient or ("vjp",) * (len(cuts) + 1)
    config = run_config(task, folder, cuts, estimator, gradient=tuple(modes), **changes)
    devices = [SimDevice(f"device{number}") for number in range(len(cuts) + 1)]
    outcome = train(config, folder / "run", devices)
    assert outcome.score is not None
    assert outcome.score.samples == len(task.eval.labels)
    after = accuracy(onnx.load(folder / "run" / MODEL_FILE), task.eval)
    # the run evaluates quantised stages as they are deployed, the file holds floats
    assert abs(after - outcome.score.accuracy) < (0.01 if estimator.quantised else 1e-3)
    return after


def report(tasks: Mapping[str, Task]) -> None:
    for name, task in tasks.items():
        before, start = accuracy(task.model, task.eval), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            after = trained(task, Path(folder))
        seconds = time.perf_counter() - start
        print(f"{name}: {before:.4f} -> {after:.4f} ({seconds:.1f} s)")  # noqa: T201


if __name__ == "__main__":
    report({name: TASKS[name]() for name in sys.argv[1:] or TASKS})
