"""Makes a plan: the optimum and the proof of it, from sweeps of the exact search."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from edgetrain.planner.exact import (
    BROKER,
    FILL,
    LOAD,
    Criterion,
    Solver,
    fill_and_broker,
)
from edgetrain.planner.placement import Placement, evaluate
from edgetrain.planner.problem import Problem

_SAME: Final = 1e-12  # relative: rounding, not a difference
_INTERVALS: Final = 60  # where halving does not close the gap
# Where the first intervals end, by the least bottleneck: sweeps of low ones are fast, and
# find plans that rule the others out.
_EDGES: Final = (1.05, 1.15, 1.3, 1.6, 2.0)
# First guesses of the bottleneck, as multiples of a perfectly even split's. A sweep over
# short stages is fast, and exact as soon as it finds a plan at all.
_GUESSES: Final = (1.1, 1.5, 3.0, 10.0, math.inf)


@dataclass(slots=True)
class Optimum:
    """The best placement so far and what is known of better ones.

    Attributes:
        bound_s: no placement takes less than this.
        visited: all placements seen, in the order of discovery.
    """

    best: Placement
    bound_s: float
    visited: list[Placement] = field(default_factory=list)

    def see(self, placement: Placement) -> None:
        self.visited.append(placement)
        if _rank(placement) < _rank(self.best):
            self.best = placement

    @property
    def gap(self) -> float:
        """By which part of its time the best may be beaten at the most; 0 is proof."""
        if self.best.time_s <= 0.0:
            return 0.0
        gap = 1.0 - self.bound_s / self.best.time_s
        return gap if gap > 1e-9 else 0.0

    @property
    def pareto(self) -> tuple[Placement, ...]:
        """The placements seen that no other beats in bottleneck and fill, best first."""
        kept: list[Placement] = []
        seen = {placement.assigned: placement for placement in self.visited}
        for one in sorted(seen.values(), key=lambda p: (p.bottleneck_s, p.fill_s)):
            if not kept or one.fill_s < kept[-1].fill_s:
                kept.append(one)
        return tuple(sorted(kept, key=_rank))


def optimise(solver: Solver, work_limit: float) -> Optimum | None:
    """Find the placement of the least predicted time; None: nothing fits.

    Inference: the least bottleneck, then the least fill, then the fewest stages.
    Training: the least ``fill + (M - 1) * bottleneck``, then the fewest stages.

    The search looks at intervals of the slowest stage's or link's time. Sweeps under the
    cap `hi` give plans, and bounds of all plans of an interval (lo, hi]: the least fill
    plus (M - 1) lo. The plan of least fill beats all those that have its bottleneck or a
    longer one; what is left is halved. The interval with the least bound is taken next,
    until none is below the best plan: then that is the optimum, by proof.

    The load of a broker of finite rate is a sum over the cuts, and a bottleneck too. For
    training, weighing it into the fill bounds plans (Lagrange), which may leave a gap.

    Args:
        solver: sweeps over the placements to choose from.
        work_limit: table entries after which the search stops and states its gap.
    """
    fastest = _least_load(solver)
    if fastest is None:
        return None
    problem = solver.problem
    low_s = fastest.slowest_s
    found = solver.least(FILL, low_s)
    quick = evaluate(problem, found.assigned) if found else fastest
    optimum = Optimum(quick, quick.time_s, [quick])
    if problem.training or quick.bottleneck_s > low_s * (1.0 + _SAME):
        _search_intervals(solver, optimum, low_s, work_limit)
    return optimum


def _least_load(solver: Solver) -> Placement | None:
    even_s = _even_s(solver.problem)
    for guess in _GUESSES:
        found = solver.least(LOAD, guess * even_s if guess < math.inf else math.inf)
        if found is not None:
            return evaluate(solver.problem, found.assigned)
    return None


def _search_intervals(
    solver: Solver, optimum: Optimum, low_s: float, work_limit: float
) -> None:
    problem = solver.problem
    least_s = sum(_fastest_s(problem)) if problem.training else 0.0
    high_s = optimum.best.bottleneck_s
    if problem.training:
        rest = problem.microbatches - 1
        high_s = (optimum.best.time_s - least_s) / rest if rest else math.inf
    # (bound, lo, hi): plans whose slowest is in (lo, hi] take no less than the bound
    edges = [low_s, *(low_s * ratio for ratio in _EDGES if low_s * ratio < high_s), high_s]
    intervals = [
        (_bound_s(problem, least_s, lo), lo, hi) for lo, hi in itertools.pairwise(edges)
    ]
    optimum.bound_s = math.inf
    for explored in itertools.count():
        if not intervals:
            break
        bound_s, low_s, high_s = heapq.heappop(intervals)
        if bound_s >= optimum.best.time_s * (1.0 - _SAME):
            break
        if solver.work > work_limit or explored == _INTERVALS:
            optimum.bound_s = bound_s
            break
        for interval in _explore(solver, optimum, (low_s, high_s)):
            heapq.heappush(intervals, interval)
    optimum.bound_s = min(optimum.bound_s, optimum.best.time_s)


def _explore(
    solver: Solver, optimum: Optimum, interval: tuple[float, float]
) -> Iterator[tuple[float, float, float]]:
    """Sweep one interval; yield what of it may still hold something better."""
    problem = solver.problem
    low_s, high_s = interval
    middle_s = math.inf
    bounds_s = [0.0, 0.0]
    for criterion, weight in _criteria(problem):
        found = solver.least(criterion, interval[1])
        if found is None:
            return
        placement = evaluate(problem, found.assigned)
        optimum.see(placement)
        if middle_s == math.inf:
            high_s = min(high_s, placement.bottleneck_s * (1.0 - 4 * _SAME))
            if high_s <= low_s:
                return
            middle_s = 0.5 * (low_s + high_s)
        for half, from_s in enumerate((low_s, middle_s)):
            bound_s = _bound_s(problem, found.value, from_s, weight)
            bounds_s[half] = max(bounds_s[half], bound_s)
    yield bounds_s[0], low_s, middle_s
    yield bounds_s[1], middle_s, high_s


def _criteria(problem: Problem) -> list[tuple[Criterion, float]]:
    """What to sweep for, and the part of (M - 1) bottlenecks that the broker stands for.

    The first one's plan beats all that have its bottleneck or a longer one.
    """
    if not problem.training:
        return [(BROKER, 1.0)]
    criteria = [(FILL, 0.0)]
    rest = problem.microbatches - 1
    if problem.broker_limited and rest:
        criteria += [(fill_and_broker(rest * w), w) for w in (0.25, 0.5, 0.75, 1.0)]
    return criteria


def _bound_s(
    problem: Problem, value: float, slowest_s: float, weight: float = 0.0
) -> float:
    """What plans take at the least, of a criterion's least value and a slowest stage."""
    if not problem.training:
        return max(value, slowest_s)
    return value + (1.0 - weight) * (problem.microbatches - 1) * slowest_s


def _rank(placement: Placement) -> tuple[float, float, int]:
    """Order of preference; times that differ by rounding count as equal."""
    time_s = float(f"{placement.time_s:.11e}")
    return time_s, float(f"{placement.fill_s:.11e}"), len(placement.stages)


def _fastest_s(problem: Problem) -> list[float]:
    """Per layer, the time on the device that is fastest at it."""
    return [
        min(_work_s(problem, number, layer) for number in range(len(problem.devices)))
        for layer in range(len(problem.layers))
    ]


def _work_s(problem: Problem, number: int, layer: int) -> float:
    device = problem.devices[number]
    back_s = device.backward_s[layer] if problem.training else 0.0
    return device.forward_s[layer] + back_s


def _even_s(problem: Problem) -> float:
    """The bottleneck if work could be split evenly, without hops: a guess."""
    layers = range(len(problem.layers))
    rates = 0.0
    for number in range(len(problem.devices)):
        work = [_work_s(problem, number, layer) for layer in layers]
        total_s = sum(t for t in work if t < math.inf)
        if total_s <= 0.0:
            return math.inf
        rates += 1.0 / total_s
    longest_s = max((t for t in _fastest_s(problem) if t < math.inf), default=0.0)
    return max(1.0 / rates, longest_s)
