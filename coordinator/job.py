"""A run's inputs, read and checked before any device is asked for anything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import onnx

from coordinator.activation_ranges import known_ranges
from coordinator.calibration import calibrate, is_fresh
from coordinator.data import RunData, fit_run_data, label_spec, load_samples, read_run_data
from coordinator.settling import settle_microbatches, settle_trainable
from coordinator.weights import Weights, merged
from edgetrain.bundle import Bundle
from edgetrain.compiler.build import Node
from edgetrain.compiler.compression import Compressed, compress, parse
from edgetrain.compiler.cut import Cut
from edgetrain.compiler.export import export
from edgetrain.compiler.export_file import export_file, has_data_files
from edgetrain.compiler.grids import Ranges
from edgetrain.compiler.load import load, model_sha256
from edgetrain.compiler.loss import labels_spec, target
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.compiler.stage import Recipe, compile_stages, pick_output
from edgetrain.compiler.stash import Keep
from edgetrain.compiler.tensor_train import TensorTrain, dense
from edgetrain.compiler.trainable import select_trainable
from edgetrain.compiler.values import value_table
from edgetrain.config import ModelConfig, RunConfig
from edgetrain.errors import GraphError
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.losses import with_mean_weight
from edgetrain.manifest import CARRYING, Mode
from edgetrain.sample_check import LabelSpec
from edgetrain.samples import Samples
from edgetrain.train_config import AUTO


@dataclass(frozen=True, slots=True)
class Means:
    """How stages are compiled, an entry a stage, as in `Recipe`; empty: as usual."""

    blocks: tuple[int, ...] = ()
    estimators: tuple[EstimatorSpec, ...] = ()
    returns: tuple[bool, ...] = ()
    keeps: tuple[Keep, ...] = ()


_USUAL: Final = Means()


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained, on what.

    Attributes:
        asked: as the run file says.
        config: the same, its microbatches settled.
        original: the user's file, as it was read.
        file_program: the file's model, normalised for the run's microbatch.
        program: the same as it is trained, some of its weights perhaps compressed.
        trainable: weights to update.
        labels: what labels must look like.
        data: the coordinator's own samples.
        sha256: of the file.
        data_files: some of its tensors lie in files beside it.
        trains: how the compressed weights are made.
        ranges: of activations, where a forward is quantised.
        source: samples of the task that the model was trained on.
    """

    asked: RunConfig
    config: RunConfig
    original: onnx.ModelProto
    file_program: Program
    program: Program
    trainable: frozenset[str]
    labels: LabelSpec
    data: RunData
    sha256: str
    data_files: bool
    trains: tuple[TensorTrain, ...]
    ranges: Ranges
    source: Samples | None = None

    def compile(
        self,
        cuts: tuple[Cut, ...],
        modes: tuple[Mode, ...],
        means: Means = _USUAL,
    ) -> list[Bundle]:
        """One bundle a stage; `cuts` and `modes` as in `Recipe`."""
        model = self.config.model
        labels = self.data.train.labels if self.data.train is not None else None
        recipe = Recipe(
            trainable=self.trainable,
            loss=model.loss,
            loss_options=with_mean_weight(model.loss_options, labels),
            modes=modes,
            batch_statistics=self.config.train.batchnorm == "train",
            output=model.output or "",
            model_sha256=self.sha256,
            blocks=means.blocks,
            keep=keep_of(self.config),
            keeps=means.keeps,
            estimator=self.config.estimator,
            estimators=means.estimators,
            returns=means.returns,
            seed=self.config.train.seed,
            ranges=self.ranges,
        )
        return compile_stages(self.program, cuts, recipe)

    def export(self, target: Path, weights: Weights) -> None:
        """Write the user's file with these weights in place of its own.

        Raises:
            GraphError: a file cannot be read or written.
            OSError: the model itself cannot be written.
        """
        values = dense(merged(self.program.weights, weights), self.trains)
        if self.data_files:
            export_file(self.config.model.path, target, self.file_program, values)
        else:
            trained = export(self.original, self.file_program, values)
            target.write_bytes(trained.SerializeToString())


def keep_of(config: RunConfig) -> Keep:
    """What the run's stages stash."""
    return Keep.INPUTS if config.plan.recompute is True else Keep.LEAST


def prepare(config: RunConfig) -> Job:
    """Read model and data, and check them before any device is asked for anything.

    Raises:
        InputError: whatever is wrong with either.
    """
    path = config.model.path
    original = load(path)
    data_inputs = _data_inputs(original)
    data = read_run_data(config.data, input_name=data_inputs[0].name)
    shapes = {**_shapes(data_inputs, data), **config.model.shapes}
    file_program = normalise(
        original,
        batch=config.train.microbatch,
        shapes=shapes,
        fixed=config.model.fixed,
        tie=config.model.tie,
        own_batch=not isinstance(config.train.microbatches, int),
    )
    asked = config
    config, file_program = settle_microbatches(config, file_program)
    choice, file_program = settle_trainable(config, file_program)
    (program, trains), trainable = _trained_form(file_program, choice, config.train.seed)
    labels = labels_for(config.model, program)
    data = fit_run_data(data, program.inputs, labels, batch_size=config.train.batch_size)
    program = _with_statistics(program, config, data)
    source = config.model.source
    job = Job(
        asked,
        config,
        original,
        file_program,
        program,
        trainable,
        labels,
        data,
        model_sha256(path),
        has_data_files(path),
        trains,
        known_ranges(program, config, data.train),
        load_samples(source, program.inputs, labels, at_least=program.batch)
        if source
        else None,
    )
    _compile_early(job)
    return job


def _with_statistics(program: Program, config: RunConfig, data: RunData) -> Program:
    """With statistics of the data where a stage needs them and the file has none yet."""
    fixed = config.train.batchnorm == "frozen" or config.gradients - {AUTO, Mode.VJP}
    if not fixed or not is_fresh(program):
        return program
    if data.train is None:
        remark = (
            "The model's BatchNormalization has never seen data, and a stage is to use its"
            " statistics as they are: train a few steps with exact gradients first."
        )
        return replace(program, remarks=(*program.remarks, remark))
    remark = (
        "The model's BatchNormalization had never seen data: its statistics were taken from"
        " the training samples before the first step."
    )
    program = calibrate(program, data.train)
    return replace(program, remarks=(*program.remarks, remark))


def _compile_early(job: Job) -> None:
    """Try it in one stage: an op without a rule is better known now."""
    common = job.config.train.common_gradient
    if common in CARRYING:
        job.compile((), (Mode(common),))
    elif job.config.gradients <= {AUTO, Mode.VJP, Mode.FROZEN}:
        job.compile((), (Mode.VJP,))


def _trained_form(
    program: Program, choice: str | tuple[str, ...], seed: int
) -> tuple[Compressed, frozenset[str]]:
    """The program to train and which of its weights."""
    compression = parse(choice)
    if compression is None:
        return Compressed(program, ()), select_trainable(program, choice)
    compressed = compress(program, compression, seed=seed)
    return compressed, select_trainable(compressed.program, "all")


def _data_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The graph's inputs that are not weights; a checked model has at least one."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [info for info in model.graph.input if info.name not in weights]
    if not inputs:
        raise GraphError("the model has no input that data could go to")
    return inputs


def _shapes(inputs: list[onnx.ValueInfoProto], data: RunData) -> dict[str, tuple[int, ...]]:
    """Shapes without the batch, from the data, of inputs that the file leaves open."""
    if data.train is None:
        return {}
    return {
        info.name: data.train.inputs[info.name].shape[1:]
        for info in inputs
        if info.name in data.train.inputs and _is_open(info)
    }


def _is_open(info: onnx.ValueInfoProto) -> bool:
    dims = info.type.tensor_type.shape.dim
    return any(not dim.HasField("dim_value") or dim.dim_value < 1 for dim in dims[1:])


def labels_for(config: ModelConfig, program: Program) -> LabelSpec:
    """What the loss needs to compare the model's output with.

    Raises:
        GraphError: the loss does not fit the output.
    """
    nodes = [Node.from_proto(proto) for proto in program.model.graph.node]
    makers = {name: node for node in nodes for name in node.outputs}
    options = config.loss_options
    output = pick_output(program, config.output or "")
    goal = value_table(program.model)[target(config.loss, output, makers, options)]
    return label_spec(config, labels_spec(config.loss, goal, options), goal)
