"""A rate that changes at known moments, and how long work takes at it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence


class Course:
    """A rate as a function of time, constant between moments.

    Args:
        first: units of work a second at the start; may be infinite.
        changes: (at_s, rate) from then on, in rising order; the last rate is above 0.
    """

    def __init__(self, first: float, changes: Sequence[tuple[float, float]] = ()) -> None:
        self._first = first
        self._moments = [at_s for at_s, _ in changes]
        self._rates = [first, *(rate for _, rate in changes)]

    def rate(self, now_s: float) -> float:
        """Units of work a second at a moment; 0 in an outage."""
        if not self._moments:
            return self._first
        return self._rates[bisect_right(self._moments, now_s)]

    def latest_start_s(self, end_s: float, work: float) -> float:
        """When work has to begin to be done by `end_s`, at the rate of that moment."""
        rate = self.rate(end_s)
        return end_s - work / rate if rate > 0.0 else end_s

    def end_s(self, start_s: float, work: float) -> float:
        """When work that begins at `start_s` is done.

        No work is done at once, or when the outage that `start_s` falls into is over.
        """
        if not self._moments:
            return start_s + work / self._first
        index = bisect_right(self._moments, start_s)
        while True:
            rate = self._rates[index]
            last = index == len(self._moments)
            change_s = math.inf if last else self._moments[index]
            if rate > 0.0 and work <= rate * (change_s - start_s):
                return start_s + work / rate
            if rate > 0.0:
                work -= rate * (change_s - start_s)
            start_s, index = change_s, index + 1
