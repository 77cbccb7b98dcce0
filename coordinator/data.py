"""The data a run's coordinator holds itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgetrain.config import DataConfig, ModelConfig
from edgetrain.sample_check import LabelSpec, check
from edgetrain.sample_files import load
from edgetrain.samples import Samples
from edgetrain.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class RunData:
    """Checked samples; None for what stays on a device or is not given."""

    train: Samples | None
    eval: Samples | None

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the user should know of how the data was made to fit."""
        parts = [part for part in (self.train, self.eval) if part is not None]
        return tuple(remark for part in parts for remark in part.remarks)


def label_spec(config: ModelConfig, labels: TensorSpec, output: TensorSpec) -> LabelSpec:
    """What values labels may have.

    Args:
        config: names the loss and its options.
        labels: their type and shape; integers are class indices.
        output: what they are compared with; one of its extents counts the classes.
    """
    if not labels.is_float:
        high = output.shape[config.loss_options.class_axis] - 1
        return LabelSpec(labels, 0, high, config.loss_options.ignore_index)
    if config.loss == "bce_with_logits" or config.loss_options.soft_labels:
        return LabelSpec(labels, low=0, high=1)
    return LabelSpec(labels)


def load_samples(
    path: Path, inputs: Sequence[TensorSpec], labels: LabelSpec, *, at_least: int = 1
) -> Samples:
    """Read a file and make it fit the model.

    Raises:
        DataError: it cannot be read, or does not fit.
    """
    return check(load(path, input_name=inputs[0].name), inputs, labels, at_least=at_least)


def read_run_data(config: DataConfig, *, input_name: str) -> RunData:
    """Read the files of ``[data]`` as they are.

    Args:
        config: the section.
        input_name: of the model's first input, for files that name no array.

    Raises:
        DataError: a file cannot be read.
    """
    files = (config.train, config.eval)
    train, held_out = (load(f, input_name=input_name) if f else None for f in files)
    return RunData(train, held_out)


def fit_run_data(
    data: RunData, inputs: Sequence[TensorSpec], labels: LabelSpec, *, batch_size: int
) -> RunData:
    """Check what was read against the model.

    Args:
        data: as read.
        inputs: of the model, the batch first.
        labels: what the loss needs.
        batch_size: samples a step; training needs one batch at least.

    Raises:
        DataError: it does not fit.
    """
    train, held_out = data.train, data.eval
    if train is not None:
        train = check(train, inputs, labels, at_least=batch_size)
    if held_out is not None:
        held_out = check(held_out, inputs, labels)
    return RunData(train, held_out)
