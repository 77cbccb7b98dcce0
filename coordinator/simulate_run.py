"""`edgetrain simulate RUN.toml`: a run on a virtual clock, without any device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

import msgspec

from coordinator.expected_fleet import simulated_devices
from coordinator.figures import bytes_text, count_text, seconds_text
from coordinator.job import prepare
from coordinator.plan_run import planner_of, show_plan, write_trace
from coordinator.settle import for_fleet
from coordinator.tables import Column, print_table
from coordinator.written_plan import written
from edgetrain.config import RunConfig
from edgetrain.errors import ConfigError
from edgetrain.plan import Plan
from edgetrain.planner.timeline_case import Case, TimedStage
from edgetrain.planner.timeline_text import chart
from edgetrain.sim.virtual import Rehearsal, rehearse

DEFAULT_STEPS: Final = 20
_COLUMNS: Final = (Column("steps"), Column("a step", numeric=True), Column("at its end"))


class LinkFacts(msgspec.Struct, frozen=True):
    """A link in the last steps: share of the time it was busy, and bytes in all steps."""

    name: str
    busy: float
    bytes: float


class SimulatedRun(msgspec.Struct, frozen=True):
    """A run on a virtual clock.

    Attributes:
        plan: what was played.
        step_end_s: when each step ended, from the beginning of the first.
        period_s: a step at the end, once the pipeline is full.
        samples_per_s: at the end.
        busy: by device, the share of the last steps in which it computes.
        path: what the last steps' time went into: seconds and share of each part.
        killed: a device that the timetable ends, and with it the run.
    """

    plan: Plan
    step_end_s: tuple[float, ...]
    period_s: float
    samples_per_s: float
    busy: dict[str, float]
    links: tuple[LinkFacts, ...]
    path: dict[str, tuple[float, float]]
    killed: str | None


def simulate_run(config: RunConfig, steps: int) -> tuple[SimulatedRun, Rehearsal]:
    """Plan a run for its simulated devices and play its first steps.

    Speeds, links, and what happens to them by the timetables are as [fleet] simulate says.
    The plan stays as it begins; a real run might move.

    Args:
        config: the run.
        steps: to play, at least 1.

    Raises:
        InputError: model, data or fleet do not do, or no plan satisfies the request.
    """
    if steps < 1:
        raise ConfigError(f"--steps {steps}: at least 1 is needed")
    job = prepare(config)
    devices = simulated_devices(config)
    job = for_fleet(job, devices)
    planner = planner_of(job, devices)
    assignment = planner.assign()
    case = planner.predict(assignment).timeline.case
    conditions = {
        device.name: device.conditions
        for device in config.fleet.simulate
        if device.name in assignment.devices
    }
    speeds = {name: condition.speed for name, condition in conditions.items()}
    rehearsal = rehearse(_at_full_speed(case, speeds), conditions, steps)
    plan = written(planner, assignment, job.sha256)
    return _facts(plan, rehearsal), rehearsal


def show(
    run: SimulatedRun, rehearsal: Rehearsal, *, as_json: bool, trace: Path | None
) -> None:
    """Write it for a program, or for people, and its last steps as a trace.

    Raises:
        ConfigError: the trace cannot be written.
    """
    if trace is not None:
        write_trace(trace, rehearsal.timeline)
    if as_json:
        print(msgspec.json.encode(run).decode())
        return
    show_plan(run.plan)
    print()
    print_table(_COLUMNS, _stretches(run.step_end_s))
    print(chart(rehearsal.timeline))
    print(
        f"at the end {seconds_text(run.period_s)} a step,"
        f" {count_text(run.samples_per_s)} samples/s"
    )
    for what, (seconds, share) in run.path.items():
        print(f"  {share:4.0%}  {seconds_text(seconds)}  {what}")
    busy = ", ".join(f"{name} {share:.0%}" for name, share in run.busy.items())
    print(f"busy: {busy}")
    links = (f"{u.name} {u.busy:.0%} ({bytes_text(u.bytes)})" for u in run.links)
    print(f"links: {', '.join(links) or '-'}")
    if run.killed is not None:
        print(f"{run.killed} is killed after step {len(run.step_end_s)}, and the run ends")


def _at_full_speed(case: Case, speeds: dict[str, float]) -> Case:
    """Stages as a device at speed 1 would run them, which is what a rehearsal slows."""

    def full(stage: TimedStage) -> TimedStage:
        speed = speeds.get(stage.device, 1.0)
        return dataclasses.replace(
            stage,
            forward_s=stage.forward_s * speed,
            backward_s=stage.backward_s * speed,
            update_s=stage.update_s * speed,
        )

    return dataclasses.replace(case, stages=tuple(map(full, case.stages)))


def _facts(plan: Plan, rehearsal: Rehearsal) -> SimulatedRun:
    timeline = rehearsal.timeline
    batch = plan.microbatches * plan.microbatch
    return SimulatedRun(
        plan=plan,
        step_end_s=rehearsal.step_end_s,
        period_s=timeline.period_s,
        samples_per_s=batch / timeline.period_s if timeline.period_s else 0.0,
        busy={name: 1.0 - bubble for name, bubble in timeline.bubble.items()},
        links=tuple(LinkFacts(u.name, u.busy, u.bytes) for u in timeline.links),
        path={s.what: (s.seconds, s.share) for s in timeline.path.shares},
        killed=rehearsal.killed,
    )


def _stretches(ends_s: tuple[float, ...]) -> list[tuple[str, str, str]]:
    """Steps in a few rows, so that a change of pace is seen."""
    rows = []
    size = -(-len(ends_s) // 8)
    for first in range(0, len(ends_s), size):
        last = min(first + size, len(ends_s)) - 1
        start_s = ends_s[first - 1] if first else 0.0
        step_s = (ends_s[last] - start_s) / (last - first + 1)
        steps = f"{first + 1} to {last + 1}" if last > first else str(first + 1)
        rows.append((steps, seconds_text(step_s), seconds_text(ends_s[last])))
    return rows
