"""How long tensors are under way between two stages, by clocks that need not agree."""

from __future__ import annotations

from typing import NamedTuple

from edgetrain.runtime.estimators.base import Tick


class HopTimes(NamedTuple):
    """Sums over the microbatches of a step, in seconds.

    Attributes:
        away_s: from sending activations downstream until their cotangents were there.
        turnaround_s: from having activations until their cotangents were sent upstream.
    """

    away_s: float
    turnaround_s: float


class HopClock:
    """One stage's side of its two cuts.

    A stage's `away_s`, less the `turnaround_s` of the stage after it, is what all hops
    over the cut between them took, both ways: each is a difference of times of one clock.
    """

    def __init__(self) -> None:
        self._left: dict[Tick, float] = {}
        self._arrived: dict[Tick, float] = {}
        self._away_s = 0.0
        self._turnaround_s = 0.0

    def left(self, tick: Tick, now_s: float) -> None:
        """Activations were sent downstream."""
        self._left[tick] = now_s

    def returned(self, tick: Tick, then_s: float) -> None:
        """The last of their cotangents arrived at `then_s`."""
        self._away_s += then_s - self._left.pop(tick, then_s)

    def arrived(self, tick: Tick, then_s: float) -> None:
        """The last of a microbatch's activations arrived at `then_s`."""
        self._arrived[tick] = then_s

    def answered(self, tick: Tick, now_s: float) -> None:
        """Its cotangents were sent upstream."""
        self._turnaround_s += now_s - self._arrived.pop(tick, now_s)

    def take(self) -> HopTimes:
        """The sums since this was asked last."""
        times = HopTimes(self._away_s, self._turnaround_s)
        self._away_s = self._turnaround_s = 0.0
        return times

    def forget(self, step: int) -> None:
        """Drop what belongs to earlier steps and was never answered."""
        for times in (self._left, self._arrived):
            for tick in [tick for tick in times if tick.step < step]:
                del times[tick]
