"""What holds at each moment for a device whose conditions change."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from edgetrain.conditions import Conditions, Happening


class Timetable:
    """A device's speed and link as functions of time.

    Until `start` is called, the conditions are those at the beginning and nothing happens.
    Times are of any one clock, in seconds.
    """

    def __init__(self, conditions: Conditions) -> None:
        happenings = sorted(conditions.timetable, key=lambda h: h.at_s)
        self._origin_s = math.inf
        self._speeds = [(-math.inf, conditions.speed)]
        self._speeds += [(h.at_s, h.speed) for h in happenings if h.speed is not None]
        self._rates = list(_rates(conditions.link_bytes_per_s, happenings))
        self.kill_at_s = next((h.at_s for h in happenings if h.kill), None)

    @property
    def started(self) -> bool:
        return self._origin_s < math.inf

    def start(self, now_s: float) -> None:
        """Let the timetable's times count from now; later calls change nothing."""
        if not self.started:
            self._origin_s = now_s

    def speed(self, now_s: float) -> float:
        """Share of the machine's speed."""
        return _at(self._speeds, now_s - self._origin_s)[1]

    def sent_s(self, start_s: float, nbytes: int) -> float:
        """When the last byte is through, if the link begins to send them at `start_s`.

        With no bytes: `start_s`, or the end of the outage that it falls into.
        """
        if not self.started:
            return start_s + nbytes / self._rates[0][1]
        now_s = start_s - self._origin_s
        index = bisect_right(self._rates, (now_s, math.inf)) - 1
        left = float(nbytes)
        while True:
            rate = self._rates[index][1]
            last = index == len(self._rates) - 1
            end_s = math.inf if last else self._rates[index + 1][0]
            if rate > 0 and (rate == math.inf or left <= rate * (end_s - now_s)):
                return self._origin_s + now_s + left / rate
            left -= rate * (end_s - now_s)
            now_s, index = end_s, index + 1


def _rates(first: float, happenings: Sequence[Happening]) -> Iterator[tuple[float, float]]:
    """Bytes/s from each moment on, 0 in an outage; the last is above 0."""
    changes = [(-math.inf, first)]
    outages = []
    for h in happenings:
        if h.link_bytes_per_s is not None:
            changes.append((h.at_s, h.link_bytes_per_s))
        if h.down_s:
            outages.append((h.at_s, h.at_s + h.down_s))
    moments = {at_s for at_s, _ in changes} | {at_s for span in outages for at_s in span}
    for at_s in sorted(moments):
        down = any(start_s <= at_s < end_s for start_s, end_s in outages)
        yield at_s, 0.0 if down else _at(changes, at_s)[1]


def _at(changes: Sequence[tuple[float, float]], now_s: float) -> tuple[float, float]:
    """The last change up to a moment; of two at one moment the later entry counts."""
    return [change for change in changes if change[0] <= now_s][-1]
