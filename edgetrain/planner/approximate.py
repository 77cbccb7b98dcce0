"""Plans for more unlike devices than the exact search can hold, with a bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from edgetrain.planner.costs import Costs
from edgetrain.planner.exact import FILL, LOAD, Solver
from edgetrain.planner.placement import Placement, evaluate
from edgetrain.planner.problem import Device, Problem
from edgetrain.planner.search import Optimum, optimise
from edgetrain.planner.space import grouped

_EXCHANGES: Final = 200  # tried at the most, and fewer where one takes long:
_EXCHANGE_ENTRIES: Final = 3e8  # of tables, in all
_STEP_WORK: Final = 2e7  # of the last search along the order found

Groups = list[list[Device]]


def exact_work(problem: Problem) -> float:
    """What a sweep of the exact search costs at the most, less than a layers' factor."""
    pins = {problem.pin_first, problem.pin_last}
    free = [device for device in problem.devices if device.name not in pins]
    _, names = grouped(free)
    return _work(problem, [len(of_type) for of_type in names])


def approximate(problem: Problem, exact_limit: float, work_limit: float) -> Optimum | None:
    """Merge devices that are alike until the exact search holds them; then improve.

    A merged type is as good in everything as the best of its devices, so its optimum is a
    bound of all plans. Its order, with the devices themselves in it, is where exchanges of
    devices begin; each order is cut exactly.

    Args:
        problem: to solve.
        exact_limit: the most that `exact_work` of the merged types may be.
        work_limit: of the search over the merged types.

    Returns:
        The best found and its bound; None when nothing fits, or nothing was found.
    """
    groups = _merge(problem, exact_limit)
    relaxed = _relaxed(problem, groups)
    bound = optimise(Solver(relaxed), work_limit)
    if bound is None:
        return None
    costs = Costs(problem)
    best: Placement | None = None
    for order in _orders(problem, bound.best, groups):
        found = _along(problem, costs, order)
        if found is not None and (best is None or found.time_s < best.time_s):
            best = found
    if best is None:
        return None
    best = _exchanged(problem, costs, best)
    order = _free(problem, best.devices)
    final = optimise(Solver(problem, order=order, costs=costs), _STEP_WORK)
    visited = [best] if final is None else [best, *final.visited]
    optimum = Optimum(best, bound.bound_s, [])
    for placement in visited:
        optimum.see(placement)
    return optimum


def _work(problem: Problem, counts: Sequence[int]) -> float:
    states = math.prod(count + 1 for count in counts)
    ways = sum(states * count / (count + 1) for count in counts)
    layers = len(problem.layers)
    both_ends = problem.pin_first is not None and problem.pin_first == problem.pin_last
    return ways * layers * (layers / 8 if both_ends else 1)


def _total_s(device: Device) -> float:
    return sum(t for t in (*device.forward_s, *device.backward_s) if t < math.inf)


def _merge(problem: Problem, limit: float) -> Groups:
    """Groups of devices, of one type at first; the two nearest in speed become one."""
    pins = {problem.pin_first, problem.pin_last}
    free = [device for device in problem.devices if device.name not in pins]
    _, names = grouped(free)
    by_name = {device.name: device for device in free}
    groups = [[by_name[name] for name in of_type] for of_type in names]
    groups.sort(key=lambda group: _total_s(group[0]))
    while _work(problem, [len(group) for group in groups]) > limit and len(groups) > 1:
        spread = [
            (_total_s(b[-1]) / max(_total_s(a[0]), 1e-300)) ** (len(a) + len(b))
            if _total_s(b[-1]) < 1e3 * max(_total_s(a[0]), 1e-300)
            else math.inf
            for a, b in itertools.pairwise(groups)
        ]
        at = spread.index(min(spread))
        groups[at : at + 2] = [[*groups[at], *groups[at + 1]]]
    return groups


def _relaxed(problem: Problem, groups: Groups) -> Problem:
    """Every device of a group as good in everything as its best."""
    pins = {problem.pin_first, problem.pin_last}
    devices = [device for device in problem.devices if device.name in pins]
    for group in groups:
        ideal = Device(
            group[0].name,
            tuple(min(times) for times in zip(*(d.forward_s for d in group), strict=True)),
            tuple(min(times) for times in zip(*(d.backward_s for d in group), strict=True)),
            max(device.memory_bytes for device in group),
            max(device.link_bytes_per_s for device in group),
            min(device.latency_s for device in group),
        )
        devices += [replace(ideal, name=device.name) for device in group]
    return replace(problem, devices=tuple(devices))


def _free(problem: Problem, names: Sequence[str]) -> list[str]:
    pins = {problem.pin_first, problem.pin_last}
    return [name for name in names if name not in pins]


def _orders(problem: Problem, relaxed: Placement, groups: Groups) -> Iterator[list[str]]:
    """Orders to begin with. A chain may drop devices at its front: the best come last."""
    group_of = {device.name: i for i, group in enumerate(groups) for device in group}
    left = [iter(sorted(group, key=_total_s)) for group in groups]
    yield [next(left[group_of[name]]).name for name in _free(problem, relaxed.devices)]
    devices = [device for group in groups for device in group]
    slowest_first = sorted(devices, key=lambda d: (-_total_s(d), d.name))
    yield [device.name for device in slowest_first]
    smallest_last = sorted(devices, key=lambda d: (-d.memory_bytes, d.name))
    yield [device.name for device in smallest_last]


def _along(
    problem: Problem,
    costs: Costs,
    order: Sequence[str],
    best: Placement | None = None,
) -> Placement | None:
    """The best of a few cuts of one order, or None if they do not beat the best."""
    solver = Solver(problem, order=order, costs=costs)
    cap_s = math.inf if best is None else best.slowest_s * (1.0 - 1e-9)
    fastest = solver.least(LOAD, cap_s)
    found = [fastest]
    if problem.training:
        fast_s = fastest.value if fastest else math.inf
        found.append(solver.least(FILL, best.slowest_s if best else 1.2 * fast_s))
    placements = [evaluate(problem, f.assigned) for f in found if f is not None]
    chosen = min(placements, key=lambda p: p.time_s, default=None)
    if chosen and (best is None or chosen.time_s < best.time_s * (1.0 - 1e-9)):
        return chosen
    return None


def _exchanged(problem: Problem, costs: Costs, best: Placement) -> Placement:
    """Exchange the device that bounds the plan with another while that helps."""
    one = len(problem.layers) ** 2 * len(problem.devices)
    most = min(_EXCHANGES, int(_EXCHANGE_ENTRIES / one))
    tried = 0
    improved = True
    while improved and tried < most:
        improved = False
        for order in _neighbours(problem, best):
            tried += 1
            found = _along(problem, costs, order, best)
            if found is not None:
                best, improved = found, True
                break
            if tried >= most:
                break
    return best


def _neighbours(problem: Problem, placement: Placement) -> Iterator[list[str]]:
    """Orders with the slowest stage's device swapped, replaced or moved."""
    order = _free(problem, placement.devices)
    by_load = sorted(
        placement.stages, key=lambda s: max(s.compute_s, s.send_s), reverse=True
    )
    slow = next((s.device for s in by_load if s.device in order), None)
    if slow is None:
        return
    at = order.index(slow)
    for other in range(len(order)):
        if other != at:
            swapped = list(order)
            swapped[at], swapped[other] = order[other], order[at]
            yield swapped
    used = set(placement.devices)
    unused = sorted(device.name for device in problem.devices if device.name not in used)
    for name in unused:
        yield [*order[:at], name, *order[at + 1 :]]
        if problem.stages is None:
            yield [*order[:at], name, *order[at:]]
    rest = [*order[:at], *order[at + 1 :]]
    for to in range(len(order)):
        if to != at:
            yield [*rest[:to], slow, *rest[to:]]
