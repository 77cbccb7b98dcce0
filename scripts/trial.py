"""Trying one real model: normalise, differentiate, check the gradient, train, export."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import onnx

from edgetrain.bundle import Bundle
from edgetrain.compiler import agreement, intake
from edgetrain.compiler.export import differences, export
from edgetrain.compiler.load import load
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.tidy import all_nodes
from edgetrain.compiler.trainable import select_trainable
from edgetrain.errors import EdgeTrainError, GraphError
from edgetrain.manifest import GraphName, Mode, Role, view
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.runtime.optim.adam import Adam
from edgetrain.runtime.parameters import Parameters
from edgetrain.tensors import TensorSpec

Array = npt.NDArray[Any]

STEPS: Final = 20
LEARNING_RATES: Final = (1e-3, 1e-4, 1e-5)
GRADIENT_TOLERANCE: Final = 1e-2
_DIRECTIONS: Final = 4
# Parts of the loss that a difference step should change: rounding spoils the small ones,
# kinks the large ones. No step is longer than a part of the weights.
_PARTS: Final = (3e-3, 3e-4, 3e-5, 3e-6)
_LONGEST: Final = 1e-2
_SMALLEST_SCALE: Final = 1e-2
# What a file that can hold one value only, or repeats a tensor, has to become.
_REPLACED: Final = ("(ConstantOfShape)", "(Identity)")


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is fed.

    Attributes:
        batch: samples a microbatch.
        shapes: of inputs that the file leaves open, without the batch.
        fixed: value of inputs that are no data, such as a recurrent net's first state.
        output: what the loss applies to; the first float output unless given.
        fresh: the file's weights are no weights (one value for all elements): draw them.
    """

    batch: int = 2
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fixed: Mapping[str, float] = field(default_factory=dict)
    output: str = ""
    fresh: bool = False


class Outcome(msgspec.Struct):
    """What became of a model.

    Attributes:
        outcome: "trains", "refused" (with the compiler's words), or "fails".
        gradient_error: median relative difference between the gradient along a direction
            and the central difference of the loss.
        replaced: nodes of the file that could not hold trained weights and became
            Constant nodes on export.
    """

    name: str
    outcome: str = "fails"
    reason: str = ""
    opset: int = 0
    nodes: int = 0
    weights: int = 0
    elements: int = 0
    loss: str = ""
    gradient_error: float | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    replaced: int = 0
    remarks: tuple[str, ...] = ()
    seconds: float = 0.0


class Stage:
    """A whole model as one stage, with its loss and gradient on one fixed batch."""

    def __init__(self, program: Program, bundle: Bundle, output: str, seed: int) -> None:
        manifest = bundle.manifest
        self.specs = [s for s in manifest.weights if s.trainable]
        self.parameters = Parameters(bundle)
        self._graphs = {}
        for name in (GraphName.LOSS, GraphName.EVALUATE):
            held = self.parameters.held(manifest.graphs[name])
            self._graphs[name] = OnnxRuntimeEngine().load(
                bundle.graphs[name], manifest.graphs[name], held
            )
        self._feeds = agreement.sample(program.model.graph, program.batch, seed)
        spec, self._labels = _labels(bundle, output, seed)
        self._feeds[spec.name] = self._labels
        self._port = next(manifest.graphs[GraphName.LOSS].ports(Role.LOSS)).name
        self._squares = output if manifest.loss == "mse" else ""

    def loss(self, weights: Array) -> float:
        self.parameters.trainable[...] = weights
        values = self._graphs[GraphName.LOSS].run(self._feeds)[self._port]
        return float(np.mean(values, dtype=np.float64))

    def gradient(self, weights: Array) -> Array:
        self.loss(weights)
        return self.parameters.scratch.copy()

    def fine_loss(self, weights: Array) -> float:
        """The loss as exactly as it can be had.

        A squared error is recomputed in double from the outputs: in float32, the error of
        outputs that do not move hides small changes of the others. The other losses are
        small numbers, and their outputs are rounded probabilities.
        """
        if not self._squares:
            return self.loss(weights)
        self.parameters.trainable[...] = weights
        values = self._graphs[GraphName.EVALUATE].run(self._feeds)[self._squares]
        errors = values.astype(np.float64) - self._labels
        return float(np.mean(errors**2))


def attempt(name: str, path: Path, setting: Setting, *, seed: int = 0) -> Outcome:
    """Everything that is asked of a model, up to the first thing that does not work."""
    outcome = Outcome(name)
    try:
        model = load(path)
        outcome.opset = intake.opset(model)
        outcome.nodes = sum(1 for _ in all_nodes(model.graph))
        program = normalise(
            model, batch=setting.batch, shapes=setting.shapes, fixed=setting.fixed
        )
        outcome.remarks = program.remarks
        outcome.weights = len(program.weights)
        output = setting.output or next(o.name for o in program.outputs if o.is_float)
        bundle = _compiled(program, output, outcome)
    except EdgeTrainError as error:
        outcome.outcome, outcome.reason = "refused", str(error)
        return outcome
    stage = Stage(program, bundle, output, seed)
    if setting.fresh:
        _draw(stage, seed)
    outcome.gradient_error = gradient_error(stage, seed)
    outcome.loss_before, outcome.loss_after = train(stage)
    _export(outcome, model, program, stage, setting)
    if outcome.gradient_error > GRADIENT_TOLERANCE:
        outcome.reason = "the gradient is not that of the loss"
    elif not outcome.loss_after < outcome.loss_before:
        outcome.reason = "the loss did not fall"
    elif not outcome.reason:
        outcome.outcome = "trains"
    return outcome


def _compiled(program: Program, output: str, outcome: Outcome) -> Bundle:
    outcome.loss = fitting_loss(program, output)
    trainable = select_trainable(program, "all")
    outcome.elements = sum(program.weights[name].size for name in trainable)
    recipe = Recipe(
        trainable, outcome.loss, (Mode.VJP,), batch_statistics=False, output=output
    )
    return compile_stages(program, [], recipe)[0]


def fitting_loss(program: Program, output: str) -> str:
    """Cross-entropy behind a final Softmax or Sigmoid, else the squared error."""
    spec = next(o for o in program.outputs if o.name == output)
    makers = {n.output[0]: n for n in program.model.graph.node}
    node = makers.get(output)
    last = len(spec.shape) - 1
    if node is not None and node.op_type == "Softmax" and last and spec.shape[-1] > 1:
        axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
        if axis in (-1, last):
            return "softmax_cross_entropy"
    if node is not None and node.op_type == "Sigmoid":
        return "bce_with_logits"
    return "mse"


def _labels(bundle: Bundle, output: str, seed: int) -> tuple[TensorSpec, Array]:
    """What labels look like, and random ones."""
    spec = bundle.manifest.labels
    if spec is None:
        raise GraphError("a model of one stage has its loss in it")
    generator = np.random.default_rng([seed, 1])
    if spec.is_float:
        return spec, generator.random(spec.shape, np.float32)
    classes = next(o.shape[-1] for o in bundle.manifest.outputs if o.name == output)
    return spec, generator.integers(0, classes, spec.shape)


def _draw(stage: Stage, seed: int) -> None:
    """He-normal weights; what has one axis becomes 1 and 0 as it was positive or not."""
    generator = np.random.default_rng([seed, 2])
    for spec in stage.specs:
        fan_in = max(1, spec.elements // max(1, spec.shape[0]))
        value = generator.standard_normal(spec.shape) * np.sqrt(2 / fan_in)
        view(stage.parameters.weights, spec)[...] = value if len(spec.shape) > 1 else 0.1


def gradient_error(stage: Stage, seed: int) -> float:
    """Median over directions of the relative error of the directional derivative.

    Directions are random, of the size of each weight, with a part along the gradient so
    that the derivative is not near zero; half of them move only half of the tensors. Each
    is compared at strides that should change the loss by a given part; the best counts.
    """
    start = stage.parameters.trainable.copy()
    gradient = stage.gradient(start)
    loss = stage.loss(start)
    generator = np.random.default_rng([seed, 3])
    errors = []
    for turn in range(_DIRECTIONS):
        direction = _direction(stage, start, gradient, generator, every=turn % 2 == 0)
        slope = abs(float(np.dot(direction.astype(np.float64), gradient)))
        strides = {min(_LONGEST, part * loss / max(slope, 1e-30)) for part in _PARTS}
        errors.append(
            min(_difference(stage, start, gradient, h * direction) for h in strides)
        )
    stage.parameters.trainable[...] = start
    return statistics.median(errors)


def _direction(
    stage: Stage,
    start: Array,
    gradient: Array,
    generator: np.random.Generator,
    *,
    every: bool,
) -> Array:
    direction = np.zeros_like(start)
    for spec in stage.specs:
        slope = view(gradient, spec)
        steepness = float(np.sqrt(np.mean(np.square(slope, dtype=np.float64))))
        if not steepness or not (every or generator.random() < 0.5):
            continue
        values = view(start, spec)
        scale = max(float(np.sqrt(np.mean(np.square(values)))), _SMALLEST_SCALE)
        noise = generator.standard_normal(spec.shape)
        view(direction, spec)[...] = scale * (noise + slope / steepness)
    return direction


def _difference(stage: Stage, start: Array, gradient: Array, step: Array) -> float:
    """|expected - measured| / the larger, for the change of the loss over two steps."""
    step = step.astype(np.float32)
    ahead, behind = start + step, start - step
    moved = np.subtract(ahead, behind, dtype=np.float64)
    expected = float(np.dot(moved, gradient.astype(np.float64)))
    measured = stage.fine_loss(ahead) - stage.fine_loss(behind)
    return abs(expected - measured) / max(abs(expected), abs(measured), 1e-30)


def train(stage: Stage) -> tuple[float, float]:
    """Loss before and after some steps of Adam, at the first rate that lowers it."""
    start = stage.parameters.trainable.copy()
    before = after = stage.loss(start)
    for rate in LEARNING_RATES:
        stage.parameters.trainable[...] = start
        optimizer = Adam(start.size)
        for _ in range(STEPS):
            gradient = stage.gradient(stage.parameters.trainable.copy())
            optimizer.step(stage.parameters.trainable, gradient, rate)
        after = stage.loss(stage.parameters.trainable.copy())
        if after < before:
            break
    return before, after


def _export(
    outcome: Outcome,
    model: onnx.ModelProto,
    program: Program,
    stage: Stage,
    setting: Setting,
) -> None:
    """Write the trained weights into the file's model, and read them from there again."""
    trained = {
        spec.name: view(stage.parameters.weights, spec).copy() for spec in stage.specs
    }
    exported = export(model, program, trained)
    changed = differences(model, exported)
    outcome.replaced = sum(any(kind in line for kind in _REPLACED) for line in changed)
    if len(changed) != outcome.replaced:
        outcome.reason = f"export changed more than weights: {_others(changed)}"
        return
    again = normalise(
        exported, batch=setting.batch, shapes=setting.shapes, fixed=setting.fixed
    )
    for name, value in trained.items():
        dtype = program.sources[name].dtype
        written = value if dtype == "float64" else value.astype(dtype).astype(np.float32)
        if name not in again.weights or not np.array_equal(again.weights[name], written):
            outcome.reason = f"weight {name!r} did not reach the file"


def _others(changed: Sequence[str]) -> str:
    return next(line for line in changed if not any(kind in line for kind in _REPLACED))
