"""The data a run's coordinator holds itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgetrain.config import DataConfig
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


def label_spec(loss: str, labels: TensorSpec, output: TensorSpec) -> LabelSpec:
    """What values labels may have.

    Args:
        loss: its name.
        labels: their type and shape; integers are class indices.
        output: what they are compared with; its last extent counts the classes.
    """
    if not labels.is_float:
        return LabelSpec(labels, low=0, high=output.shape[-1] - 1)
    if loss == "bce_with_logits":
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


def load_run_data(
    config: DataConfig, inputs: Sequence[TensorSpec], labels: LabelSpec, *, batch_size: int
) -> RunData:
    """Read and check the files of ``[data]``.

    Args:
        config: the section.
        inputs: of the model, the batch first.
        labels: what the loss needs.
        batch_size: samples a step; training needs one batch at least.

    Raises:
        DataError: a file cannot be read, or does not fit.
    """
    train = held_out = None
    if config.train is not None:
        train = load_samples(config.train, inputs, labels, at_least=batch_size)
    if config.eval is not None:
        held_out = load_samples(config.eval, inputs, labels)
    return RunData(train, held_out)
