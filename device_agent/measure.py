"""Measures a whole device: the engine's settings, every op group, and the link."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from device_agent.link_probe import measure_link
from device_agent.probe import cores, free_memory_bytes
from device_agent.probe_set import ProbeCase, ProbeSet
from device_agent.thread_search import ROUNDS, TRIALS, Threading, candidates, fewest, search
from device_agent.timing import Clock, time_case, time_updates, weights_as_inputs
from edgetrain.device_profile import Case, DeviceProfile, LinkProfile
from edgetrain.errors import EngineError
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.runtime.heap import give_back
from edgetrain.transport.base import Transport

log = logging.getLogger(__name__)

CASE_S: Final = 0.1
TOO_LONG_S: Final = 0.5  # a pass; larger batches of that case are then left out
OVERHEADS: Final = ("1 node", "33 nodes")
SHORTEST_S: Final = 1e-9

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What to measure, and with what.

    Attributes:
        device: its name.
        date: for the record.
        clock: seconds, monotonic.
        progress: told the share that is done, and what is next.
        threads: to use; None: searched.
        memory_bytes: that the device lends; None: half of what is free.
        transport: to the broker, not open yet; None: the link is left out.
        case_s: seconds for each case.
    """

    device: str
    date: str
    clock: Clock
    progress: Progress
    threads: int | None = None
    memory_bytes: int | None = None
    transport: Transport | None = None
    case_s: float = CASE_S


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile, and what the search saw: seconds relative to the best settings."""

    profile: DeviceProfile
    tried: dict[Threading, float]


def measure(plan: Measurement, probes: ProbeSet) -> Measured:
    """Measure this device.

    Args:
        plan: how.
        probes: the graphs to run.

    Raises:
        EngineError: the engine does not run the graphs.
        TransportError: the link cannot be measured.
    """
    plan.progress(0.0, "link")
    link = _link(plan)
    tried = _search(plan, probes)
    setting = fewest(tried)
    engine = OnnxRuntimeEngine(**setting._asdict())
    cases = tuple(_cases(plan, probes, engine))
    plan.progress(0.95, "weights as inputs")
    ran = {(case.name, case.batch) for case in cases}
    factors = {
        case.group: weights_as_inputs(
            probes, case, engine, clock=plan.clock, for_s=plan.case_s
        )
        for case in probes.cases
        if case.constant is not None and (case.name, case.batch) in ran
    }
    run_s, node_s = overheads(cases)
    profile = DeviceProfile(
        device=plan.device,
        engine=f"{engine.name} {engine.version}",
        cores=cores(),
        memory_bytes=plan.memory_bytes or free_memory_bytes(),
        threads=setting.threads,
        spinning=setting.spinning,
        run_overhead_s=run_s,
        node_overhead_s=node_s,
        cases=cases,
        weights_as_inputs=factors,
        block=engine.block,
        link=link,
        date=plan.date,
    )
    plan.progress(1.0, "done")
    return Measured(profile, tried)


def overheads(cases: tuple[Case, ...]) -> tuple[float, float]:
    """Fixed seconds of a forward, and those of each node, from nodes of no size.

    Raises:
        EngineError: they are not among the cases.
    """
    found = {c.name: c for c in sorted(cases, key=lambda c: -c.batch)}
    if not found.keys() >= set(OVERHEADS):
        raise EngineError("the engine does not run even the simplest graphs of a probe")
    one, many = (found[name] for name in OVERHEADS)
    node_s = max(0.0, (many.forward_s - one.forward_s) / (many.nodes - one.nodes))
    return max(one.forward_s - node_s, SHORTEST_S), node_s


def _link(plan: Measurement) -> LinkProfile | None:
    if plan.transport is None:
        return None
    return measure_link(plan.transport, clock=plan.clock)


def _search(plan: Measurement, probes: ProbeSet) -> dict[Threading, float]:
    settings = candidates(cores())
    if plan.threads is not None:
        settings = [Threading(plan.threads, s) for s in sorted({False, plan.threads > 1})]
    if len(settings) == 1:
        return {settings[0]: 1.0}
    rounds = iter(range(1, ROUNDS * len(TRIALS) + 1))

    def advance() -> None:
        share = next(rounds) / (ROUNDS * len(TRIALS))
        plan.progress(0.05 + 0.15 * share, "threads")

    tried = search(probes, settings, clock=plan.clock, advance=advance)
    give_back()
    return tried


def _cases(
    plan: Measurement, probes: ProbeSet, engine: OnnxRuntimeEngine
) -> Iterator[Case]:
    slow: set[str] = set()  # and what does not run at all
    for number, case in enumerate(_ascending(probes)):
        plan.progress(0.2 + 0.7 * number / len(probes.cases), case.name)
        if case.name in slow:
            continue
        try:
            found = time_case(probes, case, engine, clock=plan.clock, for_s=plan.case_s)
        except EngineError as error:
            log.warning("%s is left out, the engine does not run it: %s", case.name, error)
            slow.add(case.name)
            continue
        if found.forward_s + found.backward_s > TOO_LONG_S:
            slow.add(case.name)
        yield found
    plan.progress(0.9, "optimizer")
    yield from time_updates(clock=plan.clock, for_s=plan.case_s)


def _ascending(probes: ProbeSet) -> list[ProbeCase]:
    """Small batches first; else in the set's order."""
    return sorted(probes.cases, key=lambda case: case.batch)
