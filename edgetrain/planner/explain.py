"""Why nothing fits and what would help; why a device is left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from edgetrain.errors import PlanError
from edgetrain.planner.approximate import exact_work
from edgetrain.planner.exact import FILL, LOAD, SHORT, Found, Solver
from edgetrain.planner.placement import Placement, evaluate, stage_memory_bytes
from edgetrain.planner.problem import (
    MAX_DEVICES,
    MAX_TABLES,
    RECOMPUTE,
    Device,
    Layer,
    Problem,
    ranges_text,
)
from edgetrain.planner.search import optimise
from edgetrain.planner.space import grouped
from edgetrain.schedules.table import SCHEDULES

_REASONS: Final = 8  # types of device that are planned with once more, to say why not
_QUICK_WORK: Final = 3_000_000.0  # of a search that is worth making for a reason
_FORCED_WORK: Final = 3e7
_MORE_MICROBATCHES: Final = (2, 4, 8, 16, 32, 64)
_UNITS: Final = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def misfit(problem: Problem, *, exact: bool) -> PlanError:
    """Say which device is short under the cut that is kindest to memory, and what helps.

    Args:
        problem: that has no placement, or none that was found.
        exact: whether the exact search may be asked.
    """
    unable = _nobody_runs(problem)
    if unable is not None:
        return PlanError(
            f"no device can run layer {unable} of the model; add a device that can"
        )
    kindest = _kindest(problem, exact=exact)
    if kindest is None or kindest.value <= 0.0:
        return PlanError(
            "no placement was found: the devices that can run a layer cannot take their"
            " places in one pipeline. Pin fewer devices, ask for fewer stages, or add one"
        )
    name, layers, need_bytes = _shortest(problem, kindest)
    device = next(device for device in problem.devices if device.name == name)
    helps = _helps(problem)
    which = "even under the cut that is" if exact else "under the cut that was found"
    advice = f"{' or '.join(helps)} would fit" if helps else "Give it more memory"
    return PlanError(
        f"the model does not fit: device {name!r} is short by"
        f" {bytes_text(need_bytes - device.memory_bytes)} {which} kindest to memory (it"
        f" would run {layers} in {bytes_text(need_bytes)}, and has"
        f" {bytes_text(device.memory_bytes)}). {advice[:1].upper()}{advice[1:]}"
    )


def left_out_reasons(
    problem: Problem, best: Placement, work: float
) -> tuple[tuple[str, str], ...]:
    """Each device without a stage, by name, and why.

    Args:
        problem: that was planned.
        best: the plan.
        work: of a sweep over the problem; a small one is made again with the device in.
    """
    used = set(best.devices)
    out = [device for device in problem.devices if device.name not in used]
    reasons: dict[str, str] = {}
    for number, (device, names) in enumerate(zip(*grouped(out), strict=True)):
        twins = sorted(d.name for d in problem.devices if _twins(d, device, used))
        reason = _plain_reason(problem, device)
        if reason is None and number < _REASONS:
            if work <= _QUICK_WORK:
                reason = _with_it(problem, best, device.name, len(twins) + 1)
            else:
                reason = _beside_slowest(problem, best, device.name)
        if reason is None:
            reason = "the plan is faster without it"
        if twins:
            reason = f"{reason} (it equals {twins[0]}, which has a stage)"
        reasons.update(dict.fromkeys(names, reason))
    return tuple(sorted(reasons.items()))


def bytes_text(size: float) -> str:
    for unit_bytes, unit in _UNITS:
        if size >= unit_bytes:
            return f"{size / unit_bytes:.3g} {unit}"
    return f"{size:.0f} B"


def _twins(one: Device, other: Device, used: set[str]) -> bool:
    return one.name in used and one.kind == other.kind


def _nobody_runs(problem: Problem) -> int | None:
    for layer in range(len(problem.layers)):
        if all(_endless(problem, device, layer) for device in problem.devices):
            return layer
    return None


def _endless(problem: Problem, device: Device, layer: int) -> bool:
    back_s = device.backward_s[layer] if problem.training else 0.0
    return math.isinf(device.forward_s[layer] + back_s)


def _least_bytes(problem: Problem, layers: range, to_end: int) -> float:
    peak = problem.peak(to_end)
    return min(stage_memory_bytes(problem, layers, peak, o) for o in problem.options)


def _shortest(problem: Problem, found: Found) -> tuple[str, str, float]:
    """The device that is short by the most, what it would run, and in how many bytes."""
    need: dict[str, float] = {}
    runs: dict[str, list[str]] = {}
    for index, (name, layers) in enumerate(found.assigned):
        held_bytes = _least_bytes(problem, layers, len(found.assigned) - index)
        need[name] = need.get(name, 0.0) + held_bytes
        runs.setdefault(name, []).append(ranges_text(layers))
    memory = {device.name: device.memory_bytes for device in problem.devices}
    name = max(need, key=lambda n: need[n] - memory[n])
    return name, " and ".join(runs[name]), need[name]


def _helps(problem: Problem) -> list[str]:
    """Changes that would each make the model fit."""
    helps = []
    seen = set()
    for family, what, changed in _changes(problem):
        if family not in seen and _fits(changed):
            seen.add(family)
            helps.append(what)
    return helps


def _changes(problem: Problem) -> Iterator[tuple[str, str, Problem]]:
    """(family, in words, the problem so changed); the first of a family that fits does."""
    if problem.training:
        if RECOMPUTE not in problem.options:
            options = (*problem.options, RECOMPUTE)
            yield "recompute", "recompute", replace(problem, options=options)
        for times in _MORE_MICROBATCHES:
            if problem.samples % times == 0:
                count = problem.microbatches * times
                yield "microbatches", f"{count} microbatches", _split(problem, times)
        for name, schedule in SCHEDULES.items():
            if schedule.updates and name != problem.schedule:
                yield "schedule", f"schedule {name}", replace(problem, schedule=name)
    roomiest = max(problem.devices, key=lambda device: device.memory_bytes)
    names = {device.name for device in problem.devices}
    extra = next(n for n in map(str, range(len(names) + 1)) if n not in names)
    more_tables = len(problem.layers) ** 2 * (len(names) + 1)
    roomy = len(names) < MAX_DEVICES and more_tables <= MAX_TABLES
    if problem.stages is None and roomy and len(names) < len(problem.layers):
        devices = (*problem.devices, replace(roomiest, name=extra))
        more = replace(problem, devices=devices)
        yield "device", f"one more device such as {roomiest.name}", more


def _split(problem: Problem, times: int) -> Problem:
    """The same step in more and smaller microbatches."""
    layers = tuple(
        Layer(
            layer.name,
            layer.memory_bytes,
            layer.output_bytes / times,
            layer.stash_bytes / times,
            layer.cotangent_bytes and layer.cotangent_bytes / times,
        )
        for layer in problem.layers
    )
    return replace(
        problem,
        layers=layers,
        microbatches=problem.microbatches * times,
        samples=problem.samples // times,
        input_bytes=problem.input_bytes / times,
    )


def _kindest(problem: Problem, *, exact: bool) -> Found | None:
    """The placement that overfills memory the least; of one likely order if not exact."""
    if exact:
        return Solver(problem).least(SHORT)
    pins = {problem.pin_first, problem.pin_last}
    smallest_last = sorted(problem.devices, key=lambda d: (-d.memory_bytes, d.name))
    order = [device.name for device in smallest_last if device.name not in pins]
    return Solver(problem, order=order).least(SHORT)


def _fits(problem: Problem) -> bool:
    found = _kindest(problem, exact=exact_work(problem) <= _QUICK_WORK)
    return found is not None and found.value <= 0.0


def _plain_reason(problem: Problem, device: Device) -> str | None:
    layers = range(len(problem.layers))
    able = [layer for layer in layers if not _endless(problem, device, layer)]
    if not able:
        return "it cannot run any layer"
    least = min(_least_bytes(problem, range(layer, layer + 1), 1) for layer in able)
    if least > device.memory_bytes:
        return (
            f"its {bytes_text(device.memory_bytes)} of memory are too little for any layer"
            f" (the smallest takes {bytes_text(least)})"
        )
    return None


def _with_it(problem: Problem, best: Placement, name: str, at_least: int) -> str:
    """Compare with the best plan in which so many of the device's type have a stage."""
    optimum = optimise(Solver(problem, forced=name, at_least=at_least), _FORCED_WORK)
    return _comparison(problem, best, optimum.best if optimum else None, name)


def _beside_slowest(problem: Problem, best: Placement, name: str) -> str:
    """Compare with the device put at either end or beside the slowest stage."""
    pins = {problem.pin_first, problem.pin_last}
    order = [device for device in best.devices if device not in pins]
    loads = {s.device: max(s.compute_s, s.send_s) for s in best.stages if s.device in order}
    slow = order.index(max(loads, key=lambda n: loads[n])) if loads else 0
    tried = []
    for at in sorted({0, slow, slow + 1, len(order)}):
        placed = _in_order(problem, [*order[:at], name, *order[at:]], name)
        tried += [placed] if placed else []
    nearest = min(tried, key=lambda p: p.time_s, default=None)
    return f"in this order, {_comparison(problem, best, nearest, name)}"


def _in_order(problem: Problem, order: Sequence[str], name: str) -> Placement | None:
    solver = Solver(problem, order=order, forced=name)
    fastest = solver.least(LOAD)
    if fastest is None:
        return None
    placed = evaluate(problem, fastest.assigned)
    found = solver.least(FILL, placed.slowest_s)
    return evaluate(problem, found.assigned) if found else placed


def _comparison(
    problem: Problem, best: Placement, other: Placement | None, name: str
) -> str:
    what = "the step" if problem.training else "the slowest stage or link"
    if other is None:
        return "no placement with it fits"
    if other.time_s > best.time_s * (1.0 + 1e-6):
        text = (
            f"with it {what} would take {other.time_s:.4g} s instead of {best.time_s:.4g} s"
        )
        if other.bound_by == f"the link of {name}":
            text += ", which its link would take"
        return text
    longer = (
        f"a microbatch's way {other.fill_s:.4g} s instead of {best.fill_s:.4g} s"
        if other.fill_s > best.fill_s * (1.0 + 1e-6)
        else "there would be one device more to depend on"
    )
    return f"with it {what} would take the same {best.time_s:.4g} s, and {longer}"
