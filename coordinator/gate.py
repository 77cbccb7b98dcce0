"""Lets a stage without backprop go on only while it beats its deployed weights."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from coordinator.pipeline_loop import PipelineLoop
from coordinator.score import Measured, Score
from edgetrain.runtime.fallback import KEEP, TRY, UNDO

ERRORS: Final = 2.0  # standard errors of the mean difference that are more than noise

Scores = npt.NDArray[np.float32]


class Verdict(NamedTuple):
    """Of one stage at one evaluation; `trained` and `deployed` are accuracy, or loss."""

    stage: int
    step: int
    trained: float
    deployed: float
    measure: str
    rolled_back: bool


class Judge(Protocol):
    """Is told what came out."""

    def evaluated(self, step: int, score: Score) -> None: ...

    def gated(self, verdict: Verdict) -> None: ...


class Gate:
    """Compares stages with what they were: at the first evaluation, half-way, at the end.

    A stage goes back when it was worse twice in a row, or is at the end: while all weights
    are young, a stage may look bad for a while.

    Args:
        loop: of the run; evaluates.
        stages: that keep their deployed weights.
        steps: of the whole run.
        judge: is told.
    """

    def __init__(
        self, loop: PipelineLoop, stages: tuple[int, ...], steps: int, judge: Judge
    ) -> None:
        self._loop = loop
        self._stages = stages
        self._judge = judge
        self._moments = deque((1, -(-steps // 2), steps))
        self._suspects: set[int] = set()

    def due(self, step: int) -> bool:
        """Whether the evaluation after so many steps is one to compare at."""
        return bool(self._stages and self._moments) and step >= self._moments[0]

    def compare(self, step: int, measured: Measured) -> None:
        """Evaluate each stage once with its deployed weights, and act on it.

        Args:
            step: done so far.
            measured: with all trained weights, the score of each sample with it.
        """
        while self._moments and self._moments[0] <= step:
            self._moments.popleft()
        for stage in self._stages:
            self._loop.revert(stage, TRY)
            other = self._loop.measure(each=True)
            closes = self._closes(stage, worse=is_worse(measured.scores, other.scores))
            self._loop.revert(stage, KEEP if closes else UNDO)
            self._judge.gated(_verdict(stage, step, measured, other, rolled_back=closes))
            if closes:
                self._stages = tuple(n for n in self._stages if n != stage)
                measured = other
                self._judge.evaluated(step, other.score)

    def _closes(self, stage: int, *, worse: bool) -> bool:
        again = stage in self._suspects or not self._moments
        self._suspects.discard(stage)
        if worse and not again:
            self._suspects.add(stage)
        return worse and again


def is_worse(trained: Scores, deployed: Scores) -> bool:
    """Whether the trained weights score below the deployed ones by more than noise.

    The mean difference over the samples is set against its own standard error: what both
    get right or wrong alike is no noise. The scores are of the same samples, in the same
    order; more is better.
    """
    finite = np.isfinite(trained).all(), np.isfinite(deployed).all()
    if not all(finite):
        return bool(finite[1] and not finite[0])
    if trained.size < 2:
        return False
    gain = np.subtract(deployed, trained, dtype=np.float64)
    error = gain.std(ddof=1) / np.sqrt(gain.size)
    return bool(gain.mean() > ERRORS * error)


def _verdict(
    stage: int, step: int, trained: Measured, deployed: Measured, *, rolled_back: bool
) -> Verdict:
    one, other = trained.score, deployed.score
    if one.accuracy is None or other.accuracy is None:
        return Verdict(stage, step, one.loss, other.loss, "loss", rolled_back)
    values = one.accuracy, other.accuracy
    return Verdict(stage, step, *values, "accuracy", rolled_back)
