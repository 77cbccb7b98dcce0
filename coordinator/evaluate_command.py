"""`edgetrain evaluate`: a file as it is, in plain ONNX Runtime, on labelled samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import onnx

from coordinator.data import load_samples
from coordinator.job import labels_for
from coordinator.score import Score
from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.load import load
from edgetrain.compiler.loss import LABELS, attach, target
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.compiler.stage import pick_output
from edgetrain.compiler.values import value_table
from edgetrain.config import ModelConfig
from edgetrain.losses import LossOptions, hit_share, with_mean_weight
from edgetrain.manifest import GraphSpec, Port, Role
from edgetrain.runtime.engines.base import LoadedGraph
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.samples import Samples, evaluation_rows
from edgetrain.tensors import TensorSpec

BATCH: Final = 64


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is run.

    Attributes:
        scores: gives the value that the loss applies to.
        criterion: gives the loss of each sample, from those and the labels.
        loss: the criterion's name for it.
        fixed: inputs that are the same for every batch.
        goal: the value.
        options: what the loss is told.
    """

    scores: LoadedGraph
    criterion: LoadedGraph
    loss: str
    fixed: Mapping[str, npt.NDArray[Any]]
    goal: TensorSpec
    options: LossOptions


def evaluate(config: ModelConfig, data: Path) -> Score:
    """Measure loss and accuracy as a run does, but on this machine and on the file itself.

    Args:
        config: the file, the loss, and which output it applies to.
        data: labelled samples.

    Raises:
        InputError: model, loss or data do not do.
        EngineError: ONNX Runtime cannot run the file.
    """
    original = load(config.path)
    fixed = _fixed_batch(original)
    program = normalise(original, batch=fixed or BATCH)
    samples = load_samples(data, program.inputs, labels_for(config, program))
    options = with_mean_weight(config.loss_options, samples.labels)
    config = msgspec.structs.replace(config, loss_options=options)
    subject = _prepare(original, program, config)
    return _measure(subject, samples, program.batch)


def show(score: Score, *, as_json: bool) -> None:
    """Print ``{"loss":..., "accuracy":..., "samples":...}``, or the same in words."""
    if as_json:
        loss = score.loss if math.isfinite(score.loss) else None
        facts = {"loss": loss, "accuracy": score.accuracy, "samples": score.samples}
        print(msgspec.json.encode(facts).decode())
        return
    accuracy = "" if score.accuracy is None else f", accuracy {score.accuracy:.4f}"
    print(f"loss {score.loss:.4f}{accuracy} on {score.samples} samples")


def _measure(subject: _Subject, samples: Samples, batch: int) -> Score:
    loss_sum = hits = 0.0
    classes = samples.labels is not None and samples.labels.dtype.kind == "i"
    for rows, count in evaluation_rows(len(samples), batch):
        taken = samples.take(rows)
        results = subject.scores.run({**taken.inputs, **subject.fixed})
        goal = {subject.goal.name: results[subject.goal.name]}
        labels = taken.arrays()[LABELS]
        losses = subject.criterion.run({**goal, LABELS: labels})[subject.loss]
        loss_sum += float(losses[:count].sum(dtype=np.float64))
        if classes:
            shares = hit_share(goal[subject.goal.name], labels, subject.options)
            hits += float(shares[:count].sum())
    return Score(
        loss_sum / len(samples), hits / len(samples) if classes else None, len(samples)
    )


def _prepare(original: onnx.ModelProto, program: Program, config: ModelConfig) -> _Subject:
    output = pick_output(program, config.output or "")
    nodes = [Node.from_proto(proto) for proto in program.model.graph.node]
    makers = {name: node for node in nodes for name in node.outputs}
    goal = value_table(program.model)[
        target(config.loss, output, makers, config.loss_options)
    ]
    engine = OnnxRuntimeEngine()
    model, weights = original, {}
    if not _holds(original, [*program.inputs, goal]):
        # Its functions hide the value, or it works in half or double precision.
        model, weights = program.model, dict(program.weights)
    held = [TensorSpec(n, w.dtype.name, w.shape) for n, w in weights.items()]
    spec = _graph_spec([*program.inputs, *held], goal)
    scores = engine.load(_with_output(model, goal.name).SerializeToString(), spec, {})
    g = GraphBuilder({goal.name: goal}, {})
    criterion = attach(g, config.loss, goal.name, config.loss_options)
    loss = TensorSpec(criterion.loss, goal.dtype, (program.batch,))
    graph = g.model([goal, criterion.labels], [loss], "criterion").SerializeToString()
    loaded = engine.load(graph, _graph_spec([goal, criterion.labels], loss), {})
    return _Subject(scores, loaded, criterion.loss, weights, goal, config.loss_options)


def _fixed_batch(model: onnx.ModelProto) -> int:
    """The batch size that the file prescribes; 0 when it takes any."""
    held = {tensor.name for tensor in model.graph.initializer}
    for info in model.graph.input:
        dims = info.type.tensor_type.shape.dim
        if info.name not in held and dims and dims[0].dim_value > 0:
            return int(dims[0].dim_value)
    return 0


def _holds(model: onnx.ModelProto, specs: Iterable[TensorSpec]) -> bool:
    """Whether the values exist in the file's own graph, with these types."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    infos = (*inferred.input, *inferred.value_info, *inferred.output)
    types = {info.name: info.type.tensor_type.elem_type for info in infos}
    return all(
        types.get(spec.name) == onnx.helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
        for spec in specs
    )


def _with_output(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model with one more output, if it is not one already."""
    if any(info.name == name for info in model.graph.output):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.output.append(onnx.ValueInfoProto(name=name))
    return copy


def _graph_spec(inputs: Iterable[TensorSpec], output: TensorSpec) -> GraphSpec:
    ports = [Port(s.name, Role.ACTIVATION, s.name, s.dtype, s.shape) for s in inputs]
    result = Port(output.name, Role.OUTPUT, output.name, output.dtype, output.shape)
    return GraphSpec(tuple(ports), (result,), "")
