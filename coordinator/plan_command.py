"""`edgetrain plan`: which device would run which layers, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coordinator.figures import bytes_text, count_text, seconds_text
from coordinator.tables import Column, print_table
from edgetrain.planner.problem import PLAIN, Problem
from edgetrain.planner.profile_file import read_problem
from edgetrain.planner.solution import Solution, plan

_COLUMNS = (
    Column("stage", numeric=True),
    Column("device"),
    Column("layers"),
    Column("compute", numeric=True),
    Column("send", numeric=True),
    Column("memory", numeric=True),
    Column("computes"),
)
_BAR = 20  # characters of a stage that is busy all the time


class StageFacts(msgspec.Struct, frozen=True):
    """A stage; `layers` are its first and its last one, counted from 0."""

    device: str
    layers: tuple[int, int]
    option: str
    forward_s: float
    backward_s: float
    compute_s: float
    send_s: float
    memory_bytes: float


class LeftOut(msgspec.Struct, frozen=True):
    device: str
    reason: str


class PlanFacts(msgspec.Struct, frozen=True):
    """A plan as it is printed.

    Attributes:
        bottleneck_s: between one microbatch and the next, once the pipeline is full.
        fill_s: of one microbatch on its way through the empty pipeline, and back.
        step_s: of a training step; None for inference.
        throughput: samples a second; None where nothing takes any time.
        bound_by: what sets the bottleneck.
        gap: by which part of its time another plan may be faster at the most.
    """

    objective: str
    topology: str
    stages: tuple[StageFacts, ...]
    bottleneck_s: float
    fill_s: float
    step_s: float | None
    throughput: float | None
    bound_by: str
    gap: float
    left_out: tuple[LeftOut, ...]


def plan_profiles(path: Path) -> PlanFacts:
    """Plan from a profile file alone.

    Raises:
        ConfigError: the file cannot be read, or is not a profile file.
        PlanError: no placement fits.
    """
    problem = read_problem(path)
    return facts(problem, plan(problem))


def facts(problem: Problem, solution: Solution) -> PlanFacts:
    placement = solution.placement
    period_s = placement.time_s
    samples = problem.samples * (problem.microbatches if problem.training else 1)
    return PlanFacts(
        objective=problem.objective,
        topology=problem.topology,
        stages=tuple(
            StageFacts(
                device=stage.device,
                layers=(stage.layers.start, stage.layers.stop - 1),
                option=stage.option,
                forward_s=stage.forward_s,
                backward_s=stage.backward_s,
                compute_s=stage.compute_s,
                send_s=stage.send_s,
                memory_bytes=stage.memory_bytes,
            )
            for stage in placement.stages
        ),
        bottleneck_s=placement.bottleneck_s,
        fill_s=placement.fill_s,
        step_s=placement.time_s if problem.training else None,
        throughput=samples / period_s if period_s > 0.0 else None,
        bound_by=placement.bound_by,
        gap=solution.gap,
        left_out=tuple(LeftOut(*each) for each in solution.left_out),
    )


def show(found: PlanFacts, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    print_table(_COLUMNS, [_row(found, index) for index in range(len(found.stages))])
    rate = "-" if found.throughput is None else _rate_text(found.throughput)
    if found.step_s is not None:
        print(f"step        {seconds_text(found.step_s)}")
    print(f"throughput  {rate} samples/s")
    print(f"bottleneck  {seconds_text(found.bottleneck_s)}, by {found.bound_by}")
    print(f"fill        {seconds_text(found.fill_s)} for one microbatch alone")
    if found.gap > 0.0:
        print(f"optimality  no plan is more than {found.gap:.1%} faster")
    else:
        print("optimality  proved: no plan is faster")
    for names, reason in _by_reason(found.left_out):
        print(f"left out    {names}: {reason}")


def _rate_text(rate: float) -> str:
    return f"{rate:.3g}" if rate < 1000.0 else count_text(rate)


def _row(found: PlanFacts, index: int) -> tuple[str, ...]:
    stage = found.stages[index]
    first, last = stage.layers
    busy = stage.compute_s / found.bottleneck_s if found.bottleneck_s > 0.0 else 0.0
    filled = math.floor(_BAR * min(busy, 1.0) + 0.5)
    notes = [] if stage.option == PLAIN else [stage.option]
    return (
        str(index),
        stage.device,
        f"{first} to {last}" if first < last else str(first),
        seconds_text(stage.compute_s),
        seconds_text(stage.send_s),
        bytes_text(stage.memory_bytes),
        " ".join(["#" * filled + "." * (_BAR - filled), f"{busy:4.0%}", *notes]),
    )


def _by_reason(left_out: Sequence[LeftOut]) -> list[tuple[str, str]]:
    names: dict[str, list[str]] = {}
    for each in left_out:
        names.setdefault(each.reason, []).append(each.device)
    return [(", ".join(devices), reason) for reason, devices in names.items()]
