"""Notices stages whose estimated gradients are noise, while the loss does not fall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HOPELESS: Final = 0.005  # of signal to noise
PATIENCE: Final = 50  # steps
FALLEN: Final = 0.99  # of the loss before
DECAY: Final = 0.9


@dataclass(slots=True)
class _Streak:
    steps: int = 0
    loss_before: float = 0.0
    warned: bool = False


class NoiseWatch:
    """Looks at every step of a run; says of each stage once that it is hopeless."""

    def __init__(self, stages: int) -> None:
        self._streaks = [_Streak() for _ in range(stages)]
        self._loss: float | None = None

    def hopeless(self, loss: float, signals: tuple[float, ...]) -> list[int]:
        """The stages that this step is one too many for.

        Their signal to noise was below `HOPELESS` for `PATIENCE` steps, and the loss, as a
        running mean, is where it was before.

        Args:
            loss: of the step.
            signals: of each stage, running; 0 where there is no noise.
        """
        before = loss if self._loss is None else self._loss
        self._loss = DECAY * before + (1 - DECAY) * loss
        found = []
        for stage, (streak, signal) in enumerate(zip(self._streaks, signals, strict=True)):
            if signal == 0 or signal >= HOPELESS or streak.warned:
                streak.steps = 0
                continue
            if not streak.steps:
                streak.loss_before = self._loss
            streak.steps += 1
            if streak.steps <= PATIENCE:
                continue
            streak.steps = 0
            if self._loss > FALLEN * streak.loss_before:
                streak.warned = True
                found.append(stage)
        return found
