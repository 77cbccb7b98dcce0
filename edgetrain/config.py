"""The run file: what to train, on what, how and where.

Every section checks itself when it is made, so a config that exists is a valid one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import msgspec

from edgetrain.abilities import BACKWARD
from edgetrain.errors import ConfigError
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.fleet_config import FLEET, FleetConfig, fleet_table
from edgetrain.losses import LossOptions, check_loss
from edgetrain.plan_config import PlanConfig
from edgetrain.settings import (
    Section,
    choose,
    decode,
    override,
    read_table,
    require,
)
from edgetrain.train_config import USUAL_LR, TrainConfig


class ModelConfig(Section, frozen=True):
    """``[model]``.

    Attributes:
        path: of the ONNX file.
        loss: one of `edgetrain.losses.LOSSES`.
        loss_options: what the loss is told; see `LossOptions`.
        trainable: ``"all"``, ``"last:N"``, or regular expressions of weight names;
            ``"tt:r=N"``: all, dense layers through tensor trains of rank N that begin at
            random, or with ``",init=svd"`` at the file's weights. None: all, or
            ``"last:2"`` where all stages train by ``forward_gradient`` or ``spsa``.
        output: the output the loss applies to; None: the model's only one.
        shapes: by input, its shape without the batch, where the file leaves it open and
            the data stays on a device; otherwise it is taken from the data.
        fixed: by input, the value of all its elements in training, for inputs that are no
            data, such as the first state of a recurrent net.
        tie: whether matrices that are equal, as they are or transposed, train as one.
        pretrained: whether the file's weights have learnt the task, or one near it;
            ``"auto"``: a few samples tell.
        source: samples of the task that the model was trained on, in a file as that of
            [data] train; heads of stages learn from them before the run.
    """

    path: Path
    loss: str = "softmax_cross_entropy"
    loss_options: LossOptions = LossOptions()
    trainable: str | tuple[str, ...] | None = None
    output: str | None = None
    shapes: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    fixed: dict[str, float] = msgspec.field(default_factory=dict)
    tie: bool = False
    pretrained: bool | Literal["auto"] = "auto"
    source: Path | None = None

    def __post_init__(self) -> None:
        check_loss("[model] loss", self.loss, self.loss_options)
        require(
            self.trainable is None or bool(self.trainable),
            "[model] trainable is empty: write 'all' to train all",
        )
        for name, shape in self.shapes.items():
            require(
                all(extent > 0 for extent in shape),
                f"[model] shapes.{name} = {list(shape)}: extents must be 1 or more",
            )


class DataConfig(Section, frozen=True):
    """``[data]``: files of the coordinator, or a named data set that stays on a device."""

    train: Path | None = None
    eval: Path | None = None
    device: str | None = None
    dataset: str | None = None

    def __post_init__(self) -> None:
        require(
            (self.device is None) == (self.dataset is None),
            "[data] device and dataset go together: which device holds the data, and under"
            " which name its agent knows it",
        )
        require(
            (self.train is None) != (self.device is None),
            "[data] needs either train = a file, or device and dataset where the samples"
            " stay on a device",
        )


class RunConfig(Section, frozen=True):
    """A whole run file; all paths are absolute or from the current folder."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = TrainConfig()
    plan: PlanConfig = PlanConfig()
    fleet: FleetConfig = FleetConfig()
    estimator: EstimatorSpec = EstimatorSpec()

    def mentions(self, gradient: str) -> bool:
        """Whether a device or a stage is to obtain its gradients that way."""
        return gradient in self.gradients

    @property
    def gradients(self) -> frozenset[str]:
        """All the words for a gradient mode, of stages and of simulated devices.

        Those that run no backward graphs will likely estimate.
        """
        asked = self.train.gradient
        words = [asked] if isinstance(asked, str) else list(asked)
        words += list(asked.values()) if isinstance(asked, dict) else []
        devices = self.fleet.simulate
        words += ["hybrid" for device in devices if BACKWARD not in device.runs]
        return frozenset((*words, *(device.gradient for device in devices)))

    def __post_init__(self) -> None:
        pin = self.plan.pin
        named = {"[plan] pin.first": pin.first, "[plan] pin.last": pin.last}
        named["[data] device"] = self.data.device
        if isinstance(self.train.gradient, dict):
            named |= {f"[train] gradient.{name}": name for name in self.train.gradient}
        for place, name in named.items():
            if name is not None and isinstance(self.fleet.devices, tuple):
                choose(place, name, self.fleet.devices)
        stages, gradient = self.plan.stages, self.train.gradient
        if isinstance(stages, int) and isinstance(gradient, tuple):
            require(
                len(gradient) == stages,
                f"[train] gradient lists {len(gradient)} modes, [plan] stages is {stages}",
            )


def load(
    path: Path, overrides: Sequence[str] = (), fleet_file: Path | None = None
) -> RunConfig:
    """Read a run file; relative paths in it are taken from its folder.

    Args:
        path: of the TOML file.
        overrides: ``section.key=value``, applied over it.
        fleet_file: a file with a [fleet] section that is applied over it first.

    Raises:
        ConfigError: naming the file, the key and what is allowed.
    """
    table = read_table(path)
    if fleet_file is not None:
        own = table.get(FLEET, {})
        require(isinstance(own, dict), f"{path}: [{FLEET}] must be a section")
        table[FLEET] = {**own, **fleet_table(fleet_file)}
    try:
        override(table, overrides)
        return parse(table, folder=path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse(table: Mapping[str, Any], *, folder: Path) -> RunConfig:
    """Check a run file's table; relative paths in it are taken from `folder`.

    Raises:
        ConfigError: naming the key and what is allowed.
    """
    copy = deepcopy(dict(table))
    _fill(copy)
    return decode(RunConfig, copy, folder=folder)


def _fill(table: dict[str, Any]) -> None:
    """Set the learning rate to the optimizer's usual one where none is given."""
    train = table.setdefault("train", {})
    if isinstance(train, dict) and str(train.get("optimizer")) in USUAL_LR:
        train.setdefault("lr", USUAL_LR[train["optimizer"]])
