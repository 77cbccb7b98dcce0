"""What the microbatches of one evaluation add up to, at the last stage."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgetrain.runtime.stage import Evaluation
from edgetrain.wire.messages import Evaluate, Evaluated


class EvaluationSums:
    """Adds microbatches up; rows beyond the samples are padding and do not count."""

    def __init__(self, task: Evaluate) -> None:
        self._task = task
        self._left = task.samples
        self._losses = 0.0
        self._hits: float | None = 0.0
        self._scores: list[npt.NDArray[np.float32]] = []

    def add(self, result: Evaluation) -> None:
        count = min(self._left, len(result.losses))
        self._left -= count
        losses = result.losses[:count]
        self._losses += float(losses.sum(dtype=np.float64))
        scores = -losses
        if result.hits is None:
            self._hits = None
        else:
            scores = result.hits[:count].astype(np.float32)
            self._hits = (self._hits or 0.0) + float(result.hits[:count].sum())
        if self._task.each:
            self._scores.append(scores)

    def report(self) -> Evaluated:
        task = self._task
        return Evaluated(
            task.run,
            task.epoch,
            task.block,
            loss_sum=self._losses,
            correct=-1.0 if self._hits is None else self._hits,
            samples=task.samples - self._left,
            scores=b"".join(part.tobytes() for part in self._scores),
        )
