"""A virtual clock: events at their moments, one after the other."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Event = Callable[[], None]


class EventClock:
    """Runs events in the order of their times; those of one time in the order of `at`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Event]] = []

    def at(self, at_s: float, event: Event) -> None:
        """Let something happen, not before now."""
        heapq.heappush(self._events, (max(at_s, self.now_s), next(self._order), event))

    def run(self) -> None:
        """Go on until nothing is left to happen."""
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
