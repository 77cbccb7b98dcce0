"""The run file: what to train, on what, how and where.

Every section checks itself when it is made, so a config that exists is a valid one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from edgetrain.abilities import BACKWARD
from edgetrain.errors import ConfigError
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.losses import LossOptions, check_loss
from edgetrain.settings import (
    Section,
    check_broker_url,
    check_device_name,
    check_distinct,
    choose,
    decode,
    override,
    read_table,
    require,
)
from edgetrain.simulated_device import SimulatedDevice
from edgetrain.train_config import AUTO, USUAL_LR, TrainConfig

EMBEDDED: Final = "embedded"
ALL: Final = "all"


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


class PinConfig(Section, frozen=True):
    """Devices that must have the first or the last stage."""

    first: str | None = None
    last: str | None = None


class PlanConfig(Section, frozen=True):
    """``[plan]``.

    Attributes:
        stages: how many; ``"auto"``: as many as make the shortest step, or one more than
            `cuts`; ``"all"``: one a device.
        cuts: in order, each a tensor's name, or the names of all tensors that cross it.
        pin: fixed places.
        recompute: whether exact stages keep only what they received and run their forward
            again in their backward: the least memory, for about one more forward a step;
            ``"auto"``: those that would not fit otherwise.
        replan: whether stages may move in mid-run, when devices have become slower or
            faster and it pays; only where all stages are exact, and `cuts` is left out.
    """

    stages: int | str = AUTO
    cuts: tuple[str | tuple[str, ...], ...] = ()
    pin: PinConfig = PinConfig()
    recompute: bool | Literal["auto"] = "auto"
    replan: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stages, str):
            require(
                self.stages in (AUTO, ALL),
                f"[plan] stages = {self.stages!r}: write a number, 'auto' or 'all'",
            )
            return
        require(self.stages > 0, f"[plan] stages = {self.stages}: must be 1 or more")
        require(
            not self.cuts or len(self.cuts) == self.stages - 1,
            f"[plan] stages = {self.stages} needs {self.stages - 1} cuts, {len(self.cuts)}"
            " are given: leave out one of the two keys",
        )


class FleetConfig(Section, frozen=True):
    """``[fleet]``.

    Attributes:
        broker: ``"embedded"`` or a URL.
        devices: how many, or their names; None: the simulated ones, or one.
        wait_s: how long to wait for them to appear.
        step_timeout_s: without a sign of progress for so long, the run has failed.
        max_packet_bytes: that the broker takes; None: as it says itself, where it does.
            131072 suits the brokers of clouds.
    """

    broker: str = EMBEDDED
    namespace: str = "edgetrain"
    devices: int | tuple[str, ...] | None = None
    wait_s: float = 60.0
    step_timeout_s: float = 60.0
    max_packet_bytes: int | None = None
    simulate: tuple[SimulatedDevice, ...] = ()

    def __post_init__(self) -> None:
        if self.broker != EMBEDDED:
            check_broker_url("[fleet] broker", self.broker)
        check_device_name("[fleet] namespace", self.namespace)
        for key in ("wait_s", "step_timeout_s"):
            value = getattr(self, key)
            require(0 < value < math.inf, f"[fleet] {key} = {value}: must be above 0")
        most = self.max_packet_bytes
        require(
            most is None or most >= 1 << 15,
            f"[fleet] max_packet_bytes = {most}: must be 32768 or more",
        )
        self._check_devices()

    @property
    def count(self) -> int:
        """Devices the run needs."""
        if self.devices is None:
            return max(1, len(self.simulate))
        return self.devices if isinstance(self.devices, int) else len(self.devices)

    @property
    def names(self) -> tuple[str, ...]:
        """Devices that must be among them."""
        if isinstance(self.devices, tuple):
            return self.devices
        return tuple(device.name for device in self.simulate)

    def _check_devices(self) -> None:
        simulated = [device.name for device in self.simulate]
        check_distinct("[fleet] simulate", simulated)
        if isinstance(self.devices, tuple):
            for name in self.devices:
                check_device_name("[fleet] devices", name)
            check_distinct("[fleet] devices", self.devices)
            missing = sorted(set(simulated) - set(self.devices))
            require(
                not missing, f"[fleet] devices lacks the simulated {', '.join(missing)}"
            )
        require(
            self.count >= max(1, len(simulated)),
            f"[fleet] devices = {self.count} is fewer than needed: at least one, and all"
            f" {len(simulated)} of simulate",
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


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file; relative paths in it are taken from its folder.

    Args:
        path: of the TOML file.
        overrides: ``section.key=value``, applied over it.

    Raises:
        ConfigError: naming the file, the key and what is allowed.
    """
    table = read_table(path)
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
