"""One hostile file through everything that a run does with a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgetrain.bundle import Bundle
from edgetrain.compiler.cut import Cut, CutFinder
from edgetrain.compiler.export import export
from edgetrain.compiler.load import load
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.trainable import select_trainable
from edgetrain.errors import GraphError
from edgetrain.manifest import Mode
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.stage import Stage
from edgetrain.tensors import TensorSpec

Array = npt.NDArray[Any]

BATCH: Final = 2
_OPTIMIZER: Final = OptimizerSpec("sgd", LRSpec(0.01))


def train_once(path: Path) -> None:
    """Load, normalise, cut, compile, load in the engine, train a step, and export.

    Raises:
        EdgeTrainError: the file is refused. Anything else is a defect.
    """
    model = load(path)
    program = normalise(model, batch=BATCH)
    output = next((out.name for out in program.outputs if out.is_float), "")
    if not output:
        raise GraphError("no output is a float")
    trainable = select_trainable(program, "all")
    cuts = CutFinder(program, trainable).valid()
    for chosen in [(), cuts[:1]] if cuts else [()]:
        bundles = compile_stages(program, chosen, _recipe(trainable, chosen, output))
        _step(bundles, program)
    export(model, program, program.weights)


def _recipe(trainable: frozenset[str], cuts: Sequence[Cut], output: str) -> Recipe:
    return Recipe(trainable, "mse", (Mode.VJP,) * (len(cuts) + 1), output=output)


def _step(bundles: Sequence[Bundle], program: Program) -> None:
    engine = OnnxRuntimeEngine()
    stages = [Stage(b, engine, _OPTIMIZER, microbatches=1, seed=0) for b in bundles]
    rng = np.random.default_rng(0)
    tick = Tick(0, 0)
    values = {spec.name: _drawn(spec, rng) for spec in program.inputs}
    for stage in stages:
        values = dict(stage.forward(tick, values))
    labels = stages[-1].manifest.labels
    arriving = {labels.name: _drawn(labels, rng)} if labels else {}
    for stage in reversed(stages):
        arriving = dict(stage.backward(tick, arriving).cotangents)


def _drawn(spec: TensorSpec, rng: np.random.Generator) -> Array:
    if spec.is_float:
        return rng.standard_normal(spec.shape).astype(spec.dtype)
    return rng.integers(0, 2, spec.shape).astype(spec.dtype)
