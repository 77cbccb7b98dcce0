"""Prints the bytes that the training steps of bundles need; `memory.py` runs it.

    python benchmarks/peak_split.py TOY_FOLDER FOLDER STEPS

Also prints how many of them are the weights kept to return to after a fault, and the most
that was stashed. Loads what an agent loads, and no more: neither onnx nor PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import resident

from edgetrain.bundle import Bundle
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.choice import choose
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.runtime.estimators.base import Arrays, Tick
from edgetrain.runtime.stage import Stage

OPTIMIZER = OptimizerSpec("sgd", LRSpec(1e-3))
LOADING = 1  # steps in which the engine and the commits reach their sizes


def load(folder: Path, engine: OnnxRuntimeEngine) -> list[Stage]:
    def make(bundle: Bundle) -> Stage:
        return Stage(bundle, engine, OPTIMIZER, microbatches=1, seed=0)

    paths = sorted(folder.glob("*.bundle"))
    bundles = (Bundle.decode(path.read_bytes()) for path in paths)
    return [choose(bundle, engine.block, make)[0] for bundle in bundles]


def step(stages: Sequence[Stage], number: int, inputs: Arrays, labels: np.ndarray) -> int:
    """One step of one microbatch; returns what was stashed before the first backward."""
    tick = Tick(number, 0)
    values = inputs
    for stage in stages:
        values = stage.forward(tick, values)
    stashed = sum(stage.stash_bytes for stage in stages)
    arriving: Arrays = {"labels": labels}
    for stage in reversed(stages):
        arriving = stage.backward(tick, arriving).cotangents
    for stage in stages:
        stage.update(number)
    return stashed


def samples(stages: Sequence[Stage]) -> tuple[Arrays, np.ndarray]:
    generator = np.random.default_rng(0)
    inputs = {
        spec.name: generator.standard_normal(spec.shape).astype(spec.dtype)
        for spec in stages[0].manifest.receives
    }
    (labels,) = (stage.manifest.labels for stage in stages if stage.manifest.labels)
    return inputs, np.zeros(labels.shape, labels.dtype)


def main() -> None:
    toy, folder, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    engine = OnnxRuntimeEngine()
    stages = load(toy, engine)
    step(stages, 0, *samples(stages))
    del stages
    before = resident.now_bytes()
    stages = load(folder, engine)
    inputs, labels = samples(stages)
    for number in range(LOADING):
        step(stages, number, inputs, labels)
    resident.forget_peak()
    stashed = max(step(stages, LOADING + n, inputs, labels) for n in range(steps))
    kept = sum(4 * stage.manifest.elements for stage in stages)
    print(resident.peak_bytes() - before, kept, stashed)


if __name__ == "__main__":
    main()
