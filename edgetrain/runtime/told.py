"""What a stage has told the coordinator lately, to be told again when it is asked twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from edgetrain.wire.messages import Report

KEPT: Final = 8  # more than steps, norms and evaluations that can be under way


class Told:
    """Reports, and keeps the last few reports.

    Args:
        report: takes each of them for the coordinator.
    """

    def __init__(self, report: Callable[[Report], None]) -> None:
        self._report = report
        self._last: deque[Report] = deque(maxlen=KEPT)

    def say(self, report: Report) -> None:
        self._last.append(report)
        self._report(report)

    def again(self) -> None:
        """Report once more what was reported last: it may have been lost."""
        for report in tuple(self._last):
            self._report(report)
