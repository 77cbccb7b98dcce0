"""The run file's ``[train]`` section: how to train."""

from __future__ import annotations

import math
from typing import Final, Literal

from edgetrain.settings import Section, choose, require

OPTIMIZERS: Final = ("sgd", "adam", "adamw")
LR_SCHEDULES: Final = ("constant", "cosine", "step", "linear")
SCHEDULES: Final = ("gpipe", "1f1b", "1f1b-eager")
GRADIENTS: Final = (
    "auto", "vjp", "identity", "hybrid", "local_vjp", "local", "forward_gradient", "spsa",
    "frozen",
)  # fmt: skip
BATCHNORMS: Final = ("train", "frozen")
AUTO: Final = "auto"
DEFAULT_EPOCHS: Final = 10
USUAL_MICROBATCHES: Final = 4
USUAL_LR: Final = {"sgd": 0.01, "adam": 0.001, "adamw": 0.001}


class TrainConfig(Section, frozen=True):
    """``[train]``.

    Attributes:
        epochs, steps: where the run ends; with both, at whichever comes first.
        batch_size: samples a step.
        microbatches: equal parts of a batch; None: as `microbatch_count`, or as many as a
            model needs that runs at one batch size only; ``"auto"``: as many as make the
            shortest step.
        warmup_steps: over which the rate first rises to `lr`.
        lr_step, lr_gamma: with lr_schedule ``"step"``, the rate is multiplied by lr_gamma
            after every lr_step steps; 0: after each third of the run.
        clip_norm: largest norm of the whole gradient; 0 does not clip.
        schedule: one of `SCHEDULES`, or ``"auto"``: the one with the shortest step; all
            give the same weights.
        gradient: one of `GRADIENTS` for all stages, a list with one per stage, or a table
            with one per device name.
        eval_every: steps between evaluations; 0: one after each epoch.
        batchnorm: ``"train"`` normalises by the batch, ``"frozen"`` as when deployed.
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 32
    microbatches: int | Literal["auto"] | None = None
    optimizer: str = "sgd"
    lr: float = USUAL_LR["sgd"]
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_norm: float = 0.0
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    lr_step: int = 0
    lr_gamma: float = 0.1
    schedule: str = AUTO
    gradient: str | tuple[str, ...] | dict[str, str] = AUTO
    shuffle: bool = True
    seed: int = 0
    eval_every: int = 0
    batchnorm: str = "train"

    def __post_init__(self) -> None:
        self._check_words()
        self._check_counts()
        self._check_rates()

    @property
    def microbatch_count(self) -> int:
        """Microbatches a step: as asked, else four, or fewer to have equal parts.

        With ``"auto"``, what a run begins to plan with.
        """
        if isinstance(self.microbatches, int):
            return self.microbatches
        return math.gcd(self.batch_size, USUAL_MICROBATCHES)

    @property
    def microbatch(self) -> int:
        """Samples in a microbatch."""
        return self.batch_size // self.microbatch_count

    def total_steps(self, steps_per_epoch: int) -> int:
        """Steps of the whole run."""
        if self.epochs is None:
            return (
                self.steps if self.steps is not None else DEFAULT_EPOCHS * steps_per_epoch
            )
        whole = self.epochs * steps_per_epoch
        return whole if self.steps is None else min(whole, self.steps)

    def lr_step_size(self, total_steps: int) -> int:
        """Steps between two drops of the ``"step"`` learning-rate schedule, at least 1."""
        return self.lr_step or max(1, -(-total_steps // 3))

    def gradient_of(self, stage: int, device: str) -> str:
        """The gradient mode asked for at a stage; ``"auto"`` where nothing was asked."""
        if isinstance(self.gradient, str):
            return self.gradient
        if isinstance(self.gradient, dict):
            return self.gradient.get(device, AUTO)
        return self.gradient[stage] if stage < len(self.gradient) else AUTO

    @property
    def common_gradient(self) -> str:
        """The mode that all stages are asked for; ``"auto"`` where they differ."""
        asked = self.gradient
        if isinstance(asked, str):
            return asked
        words = set(asked.values() if isinstance(asked, dict) else asked)
        return words.pop() if len(words) == 1 else AUTO

    def _check_words(self) -> None:
        choose("[train] optimizer", self.optimizer, OPTIMIZERS)
        choose("[train] lr_schedule", self.lr_schedule, LR_SCHEDULES)
        choose("[train] schedule", self.schedule, (AUTO, *SCHEDULES))
        choose("[train] batchnorm", self.batchnorm, BATCHNORMS)
        if isinstance(self.gradient, str):
            choose("[train] gradient", self.gradient, GRADIENTS)
        elif isinstance(self.gradient, dict):
            for device, mode in self.gradient.items():
                choose(f"[train] gradient.{device}", mode, GRADIENTS)
        else:
            require(bool(self.gradient), "[train] gradient is an empty list; write 'auto'")
            for stage, mode in enumerate(self.gradient):
                choose(f"[train] gradient[{stage}]", mode, GRADIENTS)

    def _check_counts(self) -> None:
        for key in ("epochs", "steps", "batch_size", "microbatches"):
            value = getattr(self, key)
            require(
                not isinstance(value, int) or value > 0,
                f"[train] {key} = {value}: must be 1 or more",
            )
        for key in ("warmup_steps", "lr_step", "eval_every", "seed"):
            value = getattr(self, key)
            require(value >= 0, f"[train] {key} = {value}: must not be negative")
        require(self.seed < 1 << 63, f"[train] seed = {self.seed}: must be below 2^63")
        require(
            self.batch_size % self.microbatch_count == 0,
            f"[train] batch_size = {self.batch_size} is not a multiple of microbatches ="
            f" {self.microbatches}: a batch is split into so many equal parts",
        )

    def _check_rates(self) -> None:
        for key in ("lr", "lr_gamma", "eps"):
            value = getattr(self, key)
            require(0 < value < math.inf, f"[train] {key} = {value}: must be above 0")
        for key in ("weight_decay", "clip_norm"):
            value = getattr(self, key)
            require(0 <= value < math.inf, f"[train] {key} = {value}: must be 0 or above")
        for key in ("momentum", "beta1", "beta2"):
            value = getattr(self, key)
            require(
                0 <= value < 1, f"[train] {key} = {value}: must be in 0 ... 1, 1 excluded"
            )
        require(
            not self.nesterov or self.momentum > 0,
            "[train] nesterov = true needs a momentum above 0",
        )
