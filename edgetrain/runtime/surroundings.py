"""What the worker of a stage needs of the world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from edgetrain.runtime.estimators.base import Arrays, Tick
from edgetrain.runtime.outbox import Outbox
from edgetrain.wire.messages import Report

Array = npt.NDArray[Any]


class BatchSource(Protocol):
    """Samples that live on this device: inputs by name, and labels where there are any."""

    def training(self, tick: Tick) -> tuple[Arrays, Array | None]: ...

    def evaluation(self, microbatch: int) -> tuple[Arrays, Array | None]: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker needs of the world.

    Attributes:
        outbox: takes tensors for other stages.
        report: takes reports for the coordinator.
        clock: seconds, monotonic.
        source: this device's samples, at stage 0 if they stay here.
    """

    outbox: Outbox
    report: Callable[[Report], None]
    clock: Callable[[], float]
    source: BatchSource | None = None
