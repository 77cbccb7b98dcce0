"""Compiled stages driven in this process, without workers or messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnxruntime as ort

from edgetrain.bundle import Bundle
from edgetrain.compiler.cut import Cut, CutFinder
from edgetrain.compiler.program import Program
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.trainable import select_trainable
from edgetrain.estimator_spec import DEFAULT, EstimatorSpec
from edgetrain.manifest import GraphName, Manifest, Mode, Role, view
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.parameters import Parameters
from edgetrain.runtime.stage import Stage
from tests.cut_models import OUTPUT, program

Arrays = Mapping[str, np.ndarray]

ENGINE = OnnxRuntimeEngine()
OPTIMIZER = OptimizerSpec("sgd", LRSpec(0.1))
FIRST = Tick(0, 0)


def finder(name: str, trainable: str | Sequence[str] = "all") -> CutFinder:
    return CutFinder(program(name), select_trainable(program(name), trainable))


def compiled(  # noqa: PLR0913 - what a recipe has, each with a default
    name: str,
    cuts: Sequence[Cut] = (),
    *,
    trainable: str | Sequence[str] = "all",
    modes: Sequence[Mode] = (),
    loss: str = "softmax_cross_entropy",
    estimator: EstimatorSpec = DEFAULT,
    frozen_statistics: bool = False,
) -> list[Bundle]:
    """The bundles of a model of `cut_models`, exact unless modes are given."""
    recipe = Recipe(
        trainable=select_trainable(program(name), trainable),
        loss=loss,
        modes=tuple(modes) or (Mode.VJP,) * (len(cuts) + 1),
        output=OUTPUT.get(name, ""),
        estimator=estimator,
        batch_statistics=not frozen_statistics,
    )
    return compile_stages(program(name), cuts, recipe)


def run_graph(bundle: Bundle, name: GraphName, feeds: Arrays) -> dict[str, np.ndarray]:
    """Run one graph of a bundle on the bundle's own weights."""
    spec = bundle.manifest.graphs[name]
    held = Parameters(bundle).held(spec)
    weights = {p.name: held[p.name] for p in spec.ports(Role.WEIGHT)}
    return ENGINE.load(bundle.graphs[name], spec, {}).run({**feeds, **weights})


def evaluate(bundles: Sequence[Bundle], feeds: Arrays) -> dict[str, np.ndarray]:
    """All the `evaluate` graphs, one after another: the model's outputs, and ``loss``."""
    values = {spec.name: feeds[spec.name] for spec in bundles[0].manifest.receives}
    for bundle in bundles:
        manifest = bundle.manifest
        assert set(values) == {spec.name for spec in manifest.receives}
        given = {**values, "labels": feeds["labels"]} if manifest.is_last else values
        values |= run_graph(bundle, GraphName.EVALUATE, given)
        if not manifest.is_last:
            values = {spec.name: values[spec.name] for spec in manifest.sends}
    (loss,) = bundles[-1].manifest.graphs[GraphName.EVALUATE].ports(Role.LOSS)
    return {**values, "loss": values[loss.name]}


def whole(program: Program, feeds: Arrays) -> dict[str, np.ndarray]:
    """The normalised model itself, by ONNX Runtime."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(program.model.SerializeToString(), options)
    names = [spec.name for spec in program.outputs]
    given = {s.name: feeds[s.name] for s in program.inputs} | dict(program.weights)
    return dict(zip(names, session.run(names, given), strict=True))


@dataclass
class Pass:
    """What one microbatch gave.

    `crossing` holds all activations that were sent; `cotangents` and `stash_bytes` are a
    stage each.
    """

    crossing: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    cotangents: list[dict[str, np.ndarray]] = field(default_factory=list)
    losses: np.ndarray | None = None
    stash_bytes: list[int] = field(default_factory=list)


def stages_of(bundles: Sequence[Bundle], *, seed: int = 0) -> list[Stage]:
    return [Stage(b, ENGINE, OPTIMIZER, microbatches=1, seed=seed) for b in bundles]


def train_pass(stages: Sequence[Stage], feeds: Arrays, tick: Tick = FIRST) -> Pass:
    """One microbatch forward and back; nothing is updated."""
    done = Pass()
    values = {spec.name: feeds[spec.name] for spec in stages[0].manifest.receives}
    for stage in stages:
        stage.parameters.begin_step()
        values = dict(stage.forward(tick, values))
        done.crossing |= values
        done.stash_bytes.append(stage.stash_bytes)
    arriving: Arrays = {}
    for stage in reversed(stages):
        if stage.manifest.labels is not None:
            arriving = {**arriving, "labels": feeds["labels"]}
        result = stage.backward(tick, arriving)
        assert stage.stash_bytes == 0
        done.losses = result.losses if result.losses is not None else done.losses
        arriving = result.cotangents
        done.cotangents.insert(0, dict(arriving))
        done.gradients |= gradients(stage.parameters, stage.manifest)
    return done


def gradients(parameters: Parameters, manifest: Manifest) -> dict[str, np.ndarray]:
    """A copy of what a stage has added up, by the weight's name."""
    trained = [spec for spec in manifest.weights if spec.trainable]
    return {spec.name: view(parameters.gradient, spec).copy() for spec in trained}


def difference(found: Arrays, exact: Arrays) -> np.ndarray:
    parts = [np.subtract(found[n], exact[n], dtype=np.float64).ravel() for n in found]
    return np.concatenate([np.zeros(0), *parts])


def mean_square(errors: np.ndarray, draws: int) -> float:
    """Of the mean over so many draws, averaged over all groups of them."""
    means = errors.reshape(-1, draws, errors.shape[1]).mean(axis=1)
    return float(np.square(means).sum(axis=1).mean())
