"""What a run file leaves open and the model decides, with a remark for the user."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from edgetrain.compiler.program import Program
from edgetrain.config import RunConfig
from edgetrain.errors import ConfigError
from edgetrain.manifest import CARRYING
from edgetrain.train_config import TrainConfig


def settle_microbatches(config: RunConfig, program: Program) -> tuple[RunConfig, Program]:
    """Write the number of microbatches down, with a remark if it is the model's choice.

    Raises:
        ConfigError: the batch is no multiple of the one that the model fixes.
    """
    train, own = config.train, program.batch
    count, rest = divmod(train.batch_size, own)
    if rest:
        near = f"{count * own} or {(count + 1) * own}" if count else f"{own}"
        raise ConfigError(
            f"[train] batch_size = {train.batch_size} is no multiple of {own}, the batch"
            f" size that the model fixes and cannot do without: set it to {near}, or export"
            " the model with a dynamic batch axis"
        )
    if own != train.microbatch:
        remark = _own_batch_remark(train, program, count)
        program = replace(program, remarks=(remark, *program.remarks))
    settled = msgspec.structs.replace(train, microbatches=count)
    return msgspec.structs.replace(config, train=settled), program


def _own_batch_remark(train: TrainConfig, program: Program, count: int) -> str:
    own = program.batch
    remark = (
        f"The model fixes its batch size at {own}: each batch of {train.batch_size} is"
        f" trained in microbatches of {own}, {count} a step, their gradients averaged."
    )
    if program.states and train.batchnorm == "train":
        remark += (
            f" BatchNormalization sees {own} sample{'s' if own > 1 else ''} at a time;"
            " [train] batchnorm = 'frozen' takes the file's statistics."
        )
    return remark


def settle_trainable(
    config: RunConfig, program: Program
) -> tuple[str | tuple[str, ...], Program]:
    """Which weights train where the run leaves it open, with a remark if it is not all."""
    choice, mode = config.model.trainable, config.train.common_gradient
    if choice is not None:
        return choice, program
    if mode not in CARRYING:
        return "all", program
    remark = (
        f"[model] trainable is left out and all stages train by {mode!r}, which is the"
        " noisier the more is trained: the last two linear layers train, and what follows"
        " them. trainable = 'all' trains everything."
    )
    return "last:2", replace(program, remarks=(remark, *program.remarks))
