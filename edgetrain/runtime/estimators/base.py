"""What a stage worker needs of a way to obtain gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]


class Tick(NamedTuple):
    """One microbatch of one step."""

    step: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """What a backward gives beside the gradient it adds up.

    Attributes:
        cotangents: for upstream, by activation; or slopes, see `Rays`.
        losses: of each sample, at the last stage; None elsewhere.
    """

    cotangents: Arrays
    losses: npt.NDArray[np.float32] | None = None


class Estimator(Protocol):
    """Runs a stage forward and backward, microbatch by microbatch.

    The gradient it adds to `Parameters.gradient` is the sum over microbatches of the
    gradients of the microbatches' mean losses.
    """

    def forward(self, tick: Tick, activations: Arrays) -> Arrays:
        """Activations received to activations sent; keeps what `backward` will need."""
        ...

    def backward(self, tick: Tick, arriving: Arrays) -> Backward:
        """Use and forget what `forward` kept.

        Args:
            tick: as given to `forward`.
            arriving: the cotangents of the sent activations, by name, or slopes; at the
                last stage, and where a stage has a head, the labels, under ``labels``.
        """
        ...

    def forget(self) -> None:
        """Be as new: drop what was kept and what was learned beside the weights."""
        ...

    @property
    def stash_bytes(self) -> int:
        """Bytes kept for backwards that are still to come."""
        ...
