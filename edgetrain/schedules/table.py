"""Every schedule, by the name a run file uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from edgetrain.schedules.actions import Action
from edgetrain.schedules.forward_only import forward_only
from edgetrain.schedules.synchronous import eager_one_f_one_b, gpipe, one_f_one_b


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule and what it promises. Calling it yields a stage's compute actions.

    Attributes:
        actions: (stage, stages, microbatches) to the actions, in order.
        stash_peak: (stage, stages, microbatches) to the most microbatches whose stash the
            stage holds at once: what the planner multiplies the stash by.
        updates: it trains; a schedule that does not has no backward either.
    """

    actions: Callable[[int, int, int], Iterator[Action]]
    stash_peak: Callable[[int, int, int], int]
    updates: bool = True

    def __call__(self, stage: int, stages: int, microbatches: int) -> Iterator[Action]:
        return self.actions(stage, stages, microbatches)


SCHEDULES: Final[Mapping[str, Schedule]] = {
    "gpipe": Schedule(gpipe, lambda _stage, _stages, m: m),
    "1f1b": Schedule(one_f_one_b, lambda stage, stages, m: min(m, stages - stage)),
    "1f1b-eager": Schedule(
        eager_one_f_one_b, lambda stage, stages, m: min(m, 2 * (stages - stage) - 1)
    ),
    "forward_only": Schedule(forward_only, lambda *_: 0, updates=False),
}
