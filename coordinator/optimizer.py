"""The optimizer of a run, from its run file."""

from __future__ import annotations

from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.train_config import TrainConfig


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
