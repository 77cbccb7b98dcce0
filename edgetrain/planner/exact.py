"""The least of one criterion over all cuts, orders and subsets of devices, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from edgetrain.planner.costs import Costs, StageCosts, Table
from edgetrain.planner.placement import Assigned
from edgetrain.planner.problem import Device, Problem
from edgetrain.planner.space import Chain, Combine, Indices, Space, Sweep, grouped

Flags = npt.NDArray[np.bool_]

_SAME: Final = 1e-12  # relative: rounding, not a difference


@dataclass(frozen=True, slots=True)
class Criterion:
    """What a sweep makes least, of plans whose every load stays within a cap.

    Attributes:
        of: a stage's costs and broker time -> what counts.
        combine: of the stages: their sum or their maximum.
    """

    of: Callable[[StageCosts, Table], Table]
    combine: Combine


LOAD: Final = Criterion(lambda costs, _broker_s: costs.load_s, np.maximum)
SHORT: Final = Criterion(lambda costs, _broker_s: costs.short_bytes, np.maximum)
FILL: Final = Criterion(lambda costs, _broker_s: costs.fill_s, np.add)
BROKER: Final = Criterion(lambda _costs, broker_s: broker_s, np.add)


def fill_and_broker(weight: float) -> Criterion:
    """The fill and so many times the broker's load."""
    return Criterion(lambda costs, broker_s: costs.fill_s + weight * broker_s, np.add)


@dataclass(frozen=True, slots=True)
class Found:
    value: float
    assigned: tuple[Assigned, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """One sweep's surroundings: what closes the pipeline at both ends.

    Attributes:
        origin: by first layer, the cost of what the last device covers.
        tail: the last device's stage begins where the sweep's ends; None: no such stage.
        head: (stages to the end) -> by end layer, the cost of the first device's stage;
            None: the sweep reaches the first layer itself.
        at_least: devices in the sweep.
    """

    origin: Table
    tail: str | None
    head: Callable[[int], Table] | None
    at_least: int = 0


class Solver:
    """Answers `least` for one problem.

    Args:
        problem: to solve.
        forced: a device that must have a stage; None: whatever is best.
        at_least: how many of the type of the forced device must have one.
        order: of the devices that are not pinned, if it is given: the last of them, as
            many as is best, then make up the pipeline in this order.
        costs: of the same problem, to share; None: its own.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        forced: str | None = None,
        at_least: int = 1,
        order: Sequence[str] | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.problem = problem
        self.costs = costs or Costs(problem)
        self.work = 0  # table entries combined so far
        self._by_name = {device.name: device for device in problem.devices}
        self._space: Space
        if order is None:
            pins = {problem.pin_first, problem.pin_last}
            free = [device for device in problem.devices if device.name not in pins]
            self._types, self._names = grouped(free)
            self._space = Space([len(names) for names in self._names])
        else:
            self._types = [self._by_name[name] for name in order]
            self._names = [[name] for name in order]
            self._space = Chain(len(order))
        self._at_least = at_least
        self._forced = next(
            (t for t, names in enumerate(self._names) if forced in names), None
        )
        self._broker_s = self.costs.broker_s()
        self._offset = int(problem.pin_last is not None)
        self._weights = _weights(problem)

    def least(self, criterion: Criterion, cap_s: float = np.inf) -> Found | None:
        """The least of the criterion with loads up to the cap; None: nothing fits.

        Among equals the one with the fewest stages is taken.
        """
        best: Found | None = None
        for run in self._runs(criterion, cap_s):
            found = self._sweep(criterion, cap_s, run)
            if found and (best is None or found.value < best.value):
                best = found
        alone = self._alone(criterion, cap_s)
        if alone and (best is None or alone.value <= best.value * (1.0 + _SAME)):
            best = alone
        return best

    def _table(
        self, criterion: Criterion, cap_s: float, device: Device, to_end: int
    ) -> Table:
        costs = self.costs.stage(device, to_end)
        value = criterion.of(costs, self._broker_s)
        return np.where(costs.load_s > _most(criterion, cap_s), np.inf, value)

    def _runs(self, criterion: Criterion, cap_s: float) -> Iterator[_Run]:
        first, last = self.problem.pin_first, self.problem.pin_last
        end = len(self.problem.layers)
        if first is not None and first == last:
            yield from self._two_ended(criterion, cap_s)
            return
        head = None
        if first is not None:
            mine = self._by_name[first]

            def head(to_end: int) -> Table:
                return np.asarray(self._table(criterion, cap_s, mine, to_end)[0])

        origin = np.full(end + 1, np.inf)
        origin[end] = 0.0
        if last is not None:
            origin = self._table(criterion, cap_s, self._by_name[last], 1)[:, end].copy()
        yield _Run(origin, last, head)

    def _two_ended(self, criterion: Criterion, cap_s: float) -> Iterator[_Run]:
        """One run for every last range that the device at both ends may have."""
        end = len(self.problem.layers)
        name = str(self.problem.pin_first)
        made: dict[int, Table] = {}

        def ends(to_end: int) -> Table:
            peak = self.problem.peak(to_end)
            if peak not in made:
                costs, broker_s = self.costs.both_ends(self._by_name[name], peak)
                value = criterion.of(costs, broker_s)
                beyond = costs.load_s > _most(criterion, cap_s)
                made[peak] = np.where(beyond, np.inf, value)
            return made[peak]

        for begin in range(2, end):
            if np.isfinite(ends(3)[:, begin]).any():
                origin = np.full(end + 1, np.inf)
                origin[begin] = 0.0
                yield _Run(origin, name, _column(ends, begin), at_least=1)

    def _alone(self, criterion: Criterion, cap_s: float) -> Found | None:
        """All layers on the one device that is pinned to both ends."""
        problem = self.problem
        name = problem.pin_first
        several = problem.stages not in (None, 1) or self._forced is not None
        if name is None or name != problem.pin_last or several:
            return None
        value = float(self._table(criterion, cap_s, self._by_name[name], 1)[0, -1])
        whole = ((name, range(len(problem.layers))),)
        return Found(value, whole) if np.isfinite(value) else None

    def _sweep(self, criterion: Criterion, cap_s: float, run: _Run) -> Found | None:
        made: dict[tuple[int, int], Table] = {}

        def tables(kind: int, to_end: int) -> Table:
            key = (kind, self.problem.peak(to_end))
            if key not in made:
                made[key] = self._table(criterion, cap_s, self._types[kind], to_end)
            return made[key]

        sweep = Sweep(
            self._space,
            tables,
            run.origin,
            combine=criterion.combine,
            depth=self._depth(run),
            weights=self._weights,
            head=self._head_weight(run),
            offset=self._offset,
        )
        self.work += sweep.work
        values, cuts = self._close(criterion, run, sweep)
        values[~self._allowed(run)] = np.inf
        state = _least_of(values, self._space.level)
        if state is None:
            return None
        begin = int(cuts[state])
        stages = self._named(sweep.trace(state, begin))
        if run.head is not None:
            stages.insert(0, (str(self.problem.pin_first), range(begin)))
        covered = stages[-1][1].stop if stages else 0
        if run.tail is not None:
            stages.append((run.tail, range(covered, len(self.problem.layers))))
        return Found(float(values[state]), tuple(stages))

    def _head_weight(self, run: _Run) -> float:
        if run.head is None:
            return 0.0
        ends = np.flatnonzero(np.isfinite(run.head(self._offset + 1)))
        return float(self._weights[: ends[-1]].sum()) if len(ends) else 0.0

    def _close(self, criterion: Criterion, run: _Run, sweep: Sweep) -> tuple[Table, Table]:
        """Put the first device's stage before each state: its value and where it ends."""
        if run.head is None:
            return sweep.least[:, 0].copy(), np.zeros(self._space.size)
        values = np.full(self._space.size, np.inf)
        cuts = np.zeros(self._space.size)
        for level in range(self._depth(run) + 1):
            states = np.flatnonzero(self._space.level == level)
            head = run.head(self._offset + level + 1)
            through = criterion.combine(sweep.least[states], head)
            cuts[states] = through.argmin(axis=1)
            values[states] = through.min(axis=1)
        return values, cuts

    def _depth(self, run: _Run) -> int:
        ends = self._offset + (run.head is not None)
        most = (
            len(self.problem.layers)
            if self.problem.stages is None
            else (self.problem.stages)
        )
        return max(0, min(sum(self._space.counts), most - ends))

    def _allowed(self, run: _Run) -> Flags:
        stages = self._space.level + self._offset + (run.head is not None)
        allowed = (self._space.level >= run.at_least) & (stages >= 1)
        if self.problem.stages is not None:
            allowed &= stages == self.problem.stages
        if self._forced is not None:
            allowed &= self._space.used[self._forced] >= self._at_least
        return np.asarray(allowed)

    def _named(self, stages: Sequence[tuple[int, range]]) -> list[Assigned]:
        left = [iter(names) for names in self._names]
        return [(next(left[kind]), layers) for kind, layers in stages]


def _most(criterion: Criterion, cap_s: float) -> float:
    """The cap with room for rounding; none where stages may overfill their memory."""
    return np.inf if criterion is SHORT else cap_s * (1.0 + _SAME)


def _column(table_of: Callable[[int], Table], column: int) -> Callable[[int], Table]:
    return lambda to_end: np.asarray(table_of(to_end)[:, column])


def _least_of(values: Table, level: Indices) -> int | None:
    """The state of the least value; of those that differ by rounding, the first level's."""
    least = values.min(initial=np.inf)
    if not np.isfinite(least):
        return None
    near = np.flatnonzero(values <= least * (1.0 + _SAME))
    return int(near[level[near].argmin()])


def _weights(problem: Problem) -> Table:
    """Each layer's part of the model's work, on the average device."""
    parts = []
    for device in problem.devices:
        work_s = np.array(device.forward_s)
        if problem.training:
            work_s = work_s + np.array(device.backward_s)
        work_s[np.isinf(work_s)] = 0.0
        parts.append(work_s / max(work_s.sum(), np.finfo(np.float64).tiny))
    return np.asarray(np.mean(parts, axis=0))
