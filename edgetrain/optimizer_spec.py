"""Which optimizer a run uses, and its learning rate: values that cross to the devices.

They are plain on purpose: reading one from the wire checks its types only, so that a bad
value is refused by `check` with its own words and not as a damaged message.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from edgetrain.errors import ConfigError
from edgetrain.train_config import LR_SCHEDULES, OPTIMIZERS

MIN_EPS: Final = 1e-30  # well inside float32


class LRSpec(msgspec.Struct, frozen=True):
    """A learning-rate schedule.

    The rate rises linearly to `base` over `warmup_steps`, then follows `kind`:

    - constant: stays at `base`.
    - step: times `gamma` after every `step_size` steps.
    - linear: falls to `final` over what `total_steps` leaves after the warm-up.
    - cosine: likewise, along half a cosine.
    """

    base: float
    kind: str = "constant"
    total_steps: int = 0
    warmup_steps: int = 0
    step_size: int = 0
    gamma: float = 0.1
    final: float = 0.0

    def check(self) -> None:
        """Refuse what cannot be followed.

        Raises:
            ConfigError: an unknown kind, or a value the kind cannot use.
        """
        if self.kind not in LR_SCHEDULES:
            raise ConfigError(
                f"lr_schedule {self.kind!r} is unknown:"
                f" use one of {', '.join(LR_SCHEDULES)}"
            )
        for name in ("base", "gamma", "final"):
            _check_not_negative(f"lr {name}", getattr(self, name))
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}: it must be at least 0")
        if self.kind == "step" and self.step_size < 1:
            raise ConfigError(
                f"lr_schedule 'step' needs step_size of at least 1, got {self.step_size}"
            )
        if self.kind in ("linear", "cosine") and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"lr_schedule {self.kind!r} needs more total_steps than warmup_steps, got"
                f" {self.total_steps} and {self.warmup_steps}"
            )


class OptimizerSpec(msgspec.Struct, frozen=True):
    """The optimizer of a run, the same on every stage.

    `momentum` and `nesterov` concern sgd; `beta1`, `beta2` and `eps` adam and adamw.
    `clip_norm` bounds the norm of the whole model's gradient, not of one stage's; None
    does not clip.
    """

    name: str
    lr: LRSpec
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_norm: float | None = None

    def check(self) -> None:
        """Refuse what no optimizer can be made of.

        Raises:
            ConfigError: an unknown name, or a value out of range, here or in `lr`.
        """
        self.lr.check()
        if self.name not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer {self.name!r} is unknown: use one of {', '.join(OPTIMIZERS)}"
            )
        for name in ("momentum", "beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must lie in [0, 1)")
        _check_not_negative("weight_decay", self.weight_decay)
        if not MIN_EPS <= self.eps < math.inf:
            raise ConfigError(
                f"eps is {self.eps}: it must be at least {MIN_EPS}, or a weight whose"
                " gradient has always been 0 is divided by 0"
            )
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise ConfigError(
                f"clip_norm is {self.clip_norm}: it must be above 0, or left out"
            )
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov needs a momentum above 0, such as momentum = 0.9")


def _check_not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise ConfigError(f"{name} is {value}: it must be finite and at least 0")
