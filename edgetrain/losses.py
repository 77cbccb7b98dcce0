"""What coordinator and devices both know of a loss: its name, its options, its labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from edgetrain.errors import ConfigError
from edgetrain.settings import Section, choose, decode, override, require

Array = npt.NDArray[Any]


class LossOptions(Section, frozen=True):
    """``[model] loss_options``; `OPTIONS` says which loss takes which.

    Attributes:
        class_axis: the output's axis that counts classes; 1 for images of [N, C, H, W].
        class_weights: a factor a class, applied to the loss of its positions.
        ignore_index: positions with this label do not count.
        label_smoothing: share of the target, 0 ... 1, spread evenly over all classes.
        soft_labels: labels are probabilities of the output's shape, not class indices.
        mean_weight: what an average position weighs. Where labels are ignored or weighted
            the loss is divided by it; None: by the mean of the very labels it sees.
        pos_weight: a factor for what label 1 stands for; one, or one an entry of the
            output's last axis.
        delta: the error up to which Huber's loss is quadratic.
    """

    class_axis: int = -1
    class_weights: tuple[float, ...] = ()
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    soft_labels: bool = False
    mean_weight: float | None = None
    pos_weight: float | tuple[float, ...] = 1.0
    delta: float = 1.0

    def __post_init__(self) -> None:
        place = "loss_options:"
        require(self.class_axis != 0, f"{place} class_axis = 0 is the axis of the samples")
        weights = self.class_weights
        require(
            all(0 <= w < math.inf for w in weights) and (not weights or any(weights)),
            f"{place} class_weights must be numbers from 0 on, not all 0",
        )
        require(
            0 <= self.label_smoothing <= 1,
            f"{place} label_smoothing = {self.label_smoothing}: must be in 0 ... 1",
        )
        for weight in np.atleast_1d(self.pos_weight):
            require(0 <= weight < math.inf, f"{place} pos_weight must be 0 or more")
        for key in ("delta", "mean_weight"):
            value = getattr(self, key)
            require(
                value is None or 0 < value < math.inf,
                f"{place} {key} = {value}: must be above 0",
            )

    @property
    def weighs(self) -> bool:
        """Whether positions may count differently."""
        return self.ignore_index is not None or (
            bool(self.class_weights) and not self.soft_labels
        )


PLAIN: Final = LossOptions()
OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "softmax_cross_entropy": (
        "class_axis",
        "class_weights",
        "ignore_index",
        "label_smoothing",
        "soft_labels",
        "mean_weight",
    ),
    "bce_with_logits": ("pos_weight",),
    "mse": (),
    "l1": (),
    "huber": ("delta",),
    "cosine": (),
}
LOSSES: Final = tuple(OPTIONS)


def check_loss(place: str, loss: str, options: LossOptions) -> None:
    """Refuse an unknown loss, and options that it does not take.

    Args:
        place: where the user wrote the loss, for the message.
        loss: its name.
        options: those that differ from their default count as given.

    Raises:
        ConfigError: naming what is allowed.
    """
    choose(place, loss, LOSSES)
    for key in LossOptions.__struct_fields__:
        if key in OPTIONS[loss] or getattr(options, key) == getattr(PLAIN, key):
            continue
        takes = ", ".join(OPTIONS[loss]) or "none"
        raise ConfigError(f"{place} = {loss!r} takes no option {key!r}; it takes: {takes}")
    require(
        options.ignore_index is None or not options.soft_labels,
        "loss_options: soft_labels have no index to ignore; leave out ignore_index",
    )
    require(
        options.mean_weight is None or options.weighs,
        "loss_options: mean_weight needs ignore_index or class_weights; without them every"
        " position weighs 1",
    )


def assigned(assignments: Sequence[str]) -> LossOptions:
    """Options from ``key=value`` texts, as a command line has them.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type or range.
    """
    table: dict[str, Any] = {}
    override(table, assignments)
    return decode(LossOptions, table, folder=Path())


def with_mean_weight(options: LossOptions, labels: Array | None) -> LossOptions:
    """Settle what the loss is divided by, unless it is, from the training labels.

    A constant makes the losses of samples independent of each other, so that it does not
    matter how a batch is cut into microbatches.

    Args:
        options: of the loss.
        labels: of the training data, as the loss takes them; None where they are not
            known: the mean weight is then taken to be 1.

    Raises:
        ConfigError: no label counts.
    """
    if not options.weighs or options.mean_weight is not None:
        return options
    mean = 1.0 if labels is None else _mean_weight(options, labels)
    require(
        mean > 0,
        f"no training label counts: all are ignore_index = {options.ignore_index}, or of"
        " a class of weight 0",
    )
    return msgspec.structs.replace(options, mean_weight=mean)


def _mean_weight(options: LossOptions, labels: Array) -> float:
    counted = labels[labels != options.ignore_index]
    total = float(counted.size)
    if options.class_weights:
        total = float(np.take(options.class_weights, counted).sum())
    return total / max(1, labels.size)


def hit_share(scores: Array, labels: Array, options: LossOptions) -> Array:
    """The share of each sample's labels that have the highest score.

    Args:
        scores: [N, ...], with the classes on `options.class_axis`.
        labels: class indices, of the scores' shape without that axis.
        options: positions labelled `ignore_index` do not count.

    Returns:
        float64 of shape [N]; 0 for a sample of which no position counts.
    """
    hits = np.equal(scores.argmax(axis=options.class_axis), labels)
    counted = np.ones_like(hits)
    if options.ignore_index is not None:
        counted = np.not_equal(labels, options.ignore_index)
    rows = (len(labels), -1)
    found = (hits & counted).reshape(rows).sum(axis=1)
    share: Array = found / np.maximum(1, counted.reshape(rows).sum(axis=1))
    return share
