"""What an evaluation came to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgetrain.wire.messages import Evaluated


class Score(NamedTuple):
    """Of an evaluation; `accuracy` is None where the loss has no classes."""

    loss: float
    accuracy: float | None
    samples: int


class Measured(NamedTuple):
    """A score, and that of each sample where it was asked for; see `Evaluated.scores`."""

    score: Score
    scores: npt.NDArray[np.float32]


def score_of(parts: Sequence[Evaluated]) -> Score:
    """Of all parts together, each weighted by its samples."""
    samples = sum(part.samples for part in parts)
    loss = math.fsum(part.loss_sum for part in parts) / samples
    hits = [part.correct for part in parts]
    accuracy = None if min(hits) < 0 else math.fsum(hits) / samples
    return Score(loss, accuracy, samples)
