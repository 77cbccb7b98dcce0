"""A run's inputs, read and checked before any device is asked for anything."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from coordinator.data import RunData, label_spec, load_run_data
from coordinator.pipeline_loop import Weights, merged
from edgetrain.bundle import Bundle, Mode
from edgetrain.compiler.build import Node, value_table
from edgetrain.compiler.cut import Cut
from edgetrain.compiler.export import export
from edgetrain.compiler.load import load, model_sha256
from edgetrain.compiler.loss import labels_spec, target
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.compiler.stage import Recipe, compile_stages, pick_output
from edgetrain.compiler.trainable import select_trainable
from edgetrain.config import ModelConfig, RunConfig
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.sample_check import LabelSpec
from edgetrain.train_config import TrainConfig


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained, on what.

    Attributes:
        original: the user's file, as it was read.
        program: normalised for the run's microbatch.
        trainable: weights to update.
        labels: what labels must look like.
        data: the coordinator's own samples.
        sha256: of the file.
    """

    config: RunConfig
    original: onnx.ModelProto
    program: Program
    trainable: frozenset[str]
    labels: LabelSpec
    data: RunData
    sha256: str

    def compile(self, cuts: tuple[Cut, ...], modes: tuple[Mode, ...]) -> list[Bundle]:
        """One bundle a stage."""
        model = self.config.model
        recipe = Recipe(
            trainable=self.trainable,
            loss=model.loss,
            modes=modes,
            batch_statistics=self.config.train.batchnorm == "train",
            output=model.output or "",
            model_sha256=self.sha256,
        )
        return compile_stages(self.program, cuts, recipe)

    def export(self, weights: Weights) -> bytes:
        """The user's file with these weights in place of its own."""
        trained = export(self.original, self.program, merged(self.program.weights, weights))
        data: bytes = trained.SerializeToString()
        return data


def prepare(config: RunConfig) -> Job:
    """Read model and data.

    Raises:
        InputError: whatever is wrong with either.
    """
    path = config.model.path
    original = load(path)
    program = normalise(original, batch=config.train.microbatch)
    trainable = select_trainable(program, config.model.trainable)
    labels = labels_for(config.model, program)
    data = load_run_data(
        config.data, program.inputs, labels, batch_size=config.train.batch_size
    )
    return Job(config, original, program, trainable, labels, data, model_sha256(path))


def labels_for(config: ModelConfig, program: Program) -> LabelSpec:
    """What the loss needs to compare the model's output with.

    Raises:
        GraphError: the loss does not fit the output.
    """
    nodes = [Node.from_proto(proto) for proto in program.model.graph.node]
    makers = {name: node for node in nodes for name in node.outputs}
    goal = target(config.loss, pick_output(program, config.output or ""), makers)
    output = value_table(program.model)[goal]
    return label_spec(config.loss, labels_spec(config.loss, output), output)


def optimizer_spec(train: TrainConfig, total_steps: int) -> OptimizerSpec:
    """The optimizer that ``[train]`` describes.

    Raises:
        ConfigError: a value is out of range, such as a warm-up longer than the run.
    """
    lr = LRSpec(
        base=train.lr,
        kind=train.lr_schedule,
        total_steps=total_steps,
        warmup_steps=train.warmup_steps,
        step_size=train.lr_step_size(total_steps),
        gamma=train.lr_gamma,
    )
    return OptimizerSpec(
        name=train.optimizer,
        lr=lr,
        momentum=train.momentum if train.optimizer == "sgd" else 0.0,
        nesterov=train.nesterov,
        weight_decay=train.weight_decay,
        beta1=train.beta1,
        beta2=train.beta2,
        eps=train.eps,
        clip_norm=train.clip_norm or None,
    )
