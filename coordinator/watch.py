"""Who looks on at a run, and how it is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.progress import Progress


@dataclass(frozen=True, slots=True)
class Watch:
    """How a run is watched and stopped.

    Attributes:
        stopped: asked between steps.
        clock: seconds, monotonic.
    """

    progress: Progress
    stopped: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.perf_counter
