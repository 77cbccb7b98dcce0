"""`edgetrain plan RUN.toml`: what a run would do, before it does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from coordinator.connection import coordinator_transport
from coordinator.expected_fleet import simulated_devices
from coordinator.figures import bytes_text, count_text, seconds_text
from coordinator.fleet import Fleet
from coordinator.job import Job, prepare
from coordinator.planning import Planner
from coordinator.profile_cache import NO_CACHE, ProfileCache
from coordinator.settle import for_fleet
from coordinator.tables import Column, print_table
from coordinator.written_plan import written
from edgetrain.config import RunConfig
from edgetrain.errors import ConfigError
from edgetrain.fleet_config import EMBEDDED
from edgetrain.plan import HopPlan, Plan, StagePlan
from edgetrain.planner.chrome_trace import chrome_trace
from edgetrain.planner.timeline import Timeline
from edgetrain.planner.timeline_text import text
from edgetrain.wire.hello import Hello

_COLUMNS = (
    Column("stage", numeric=True),
    Column("device"),
    Column("gradient"),
    Column("layers", numeric=True),
    Column("weights", numeric=True),
    Column("forward", numeric=True),
    Column("backward", numeric=True),
    Column("memory", numeric=True),
    Column("sends on, a microbatch"),
)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A plan, and how its steps would go."""

    plan: Plan
    timeline: Timeline


def plan_run(
    config: RunConfig, password: str | None, cache: ProfileCache = NO_CACHE
) -> PlannedRun:
    """Plan a run without running it.

    Devices on a broker are asked what they can do; where the run starts a broker of its
    own, its simulated devices are taken as this machine and the run file describe them.

    Args:
        config: the run.
        password: of the broker, where its URL has none.
        cache: of what earlier runs measured.

    Raises:
        InputError: model, data or fleet do not do, or no plan satisfies the request.
        FleetError: a device is not there.
    """
    job = prepare(config)
    devices = _devices(config, password)
    job = for_fleet(job, devices, cache)
    planner = planner_of(job, devices, cache)
    assignment = planner.assign()
    timeline = planner.predict(assignment).timeline
    return PlannedRun(written(planner, assignment, job.sha256), timeline)


def planner_of(
    job: Job, devices: Mapping[str, Hello], cache: ProfileCache = NO_CACHE
) -> Planner:
    """The planner of a run on these devices."""
    return Planner(job.config, job, devices, cache)


def show(found: PlannedRun, *, as_json: bool, trace: Path | None) -> None:
    """Write a plan for a program, or for people, and its steps as a trace.

    Raises:
        ConfigError: the trace cannot be written.
    """
    if trace is not None:
        write_trace(trace, found.timeline)
    if as_json:
        print(msgspec.json.encode(found.plan).decode())
        return
    show_plan(found.plan)
    print(text(found.timeline))


def write_trace(path: Path, timeline: Timeline) -> None:
    """Write a timeline for chrome://tracing or ui.perfetto.dev.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(chrome_trace(timeline), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be written: {error}") from error


def show_plan(plan: Plan) -> None:
    """Write the plan itself."""
    hops = [*plan.hops, None]
    rows = []
    for stage, hop in zip(plan.stages, hops, strict=True):
        crossing = f"{', '.join(stage.cut)}: {_hop_text(hop)}" if hop else "-"
        rows.append((*_cells(stage), crossing))
    print_table(_COLUMNS, rows)
    batch = plan.microbatches * plan.microbatch
    rate = batch / plan.predicted_step_s if plan.predicted_step_s else 0.0
    parts = "microbatch" if plan.microbatches == 1 else "microbatches"
    print(
        f"{batch} samples a step in {plan.microbatches} {parts}:"
        f" {seconds_text(plan.predicted_step_s)} a step, {count_text(rate)} samples/s"
    )
    print(plan.reason)
    for stage in plan.stages:
        print(f"stage {stage.stage}: {stage.mode}; {stage.reason}")
    for name, reason in plan.left_out.items():
        print(f"{name} gets no stage: {reason}")
    for remark in plan.remarks:
        print(f"note: {remark}")


def _devices(config: RunConfig, password: str | None) -> Mapping[str, Hello]:
    fleet = config.fleet
    if fleet.broker == EMBEDDED:
        return simulated_devices(config)
    found = Fleet(coordinator_transport(fleet, password))
    try:
        found.open()
        return found.wait(fleet.names, fleet.count, fleet.wait_s)
    finally:
        found.close()


def _hop_text(hop: HopPlan) -> str:
    nbytes = bytes_text(hop.down_bytes)
    return f"{nbytes} as {hop.codecs}" if hop.codecs else nbytes


def _cells(stage: StagePlan) -> tuple[str, ...]:
    again = " (recomputed)" if stage.stash == "inputs" else ""
    return (
        str(stage.stage),
        stage.device,
        f"{stage.mode}{again}",
        str(stage.layers),
        count_text(stage.parameters),
        seconds_text(stage.predicted_forward_s),
        seconds_text(stage.predicted_backward_s),
        bytes_text(stage.predicted_memory_bytes),
    )
