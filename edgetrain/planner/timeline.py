"""Simulates a plan before it runs: step time, bubble, stash, link use, critical path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgetrain.errors import PlanError
from edgetrain.planner.critical_path import CriticalPath, walk_back
from edgetrain.planner.timeline_case import Case
from edgetrain.planner.timeline_engine import Engine, Played
from edgetrain.planner.timeline_links import BROKER
from edgetrain.planner.timeline_nodes import Node

STEPS: Final = 6
MAX_STEPS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What a link did in the measured steps.

    Attributes:
        name: such as ``pi uplink``, ``coordinator downlink`` or ``broker``.
        busy: share of the time, 0 to 1.
        bytes: carried, in all steps.
    """

    name: str
    busy: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated run of some steps.

    Attributes:
        case: what was simulated.
        step_end_s: when the last stage was done with each step.
        period_s: between the ends of two steps, once the pipeline is full: the mean over
            the measured steps. Of a single step, its time.
        measured_steps: the last ones.
        measured_from_s: the end of the last step that is not measured.
        bubble: per device with a stage, the share of the measured time in which it does
            not compute, 0 to 1.
        stash_peak: the most microbatches stashed at once, per stage.
        memory_peak_bytes: per stage: fixed, stashed, and arrived but not yet used. The
            peaks of the last two need not come together.
        links: those that carried something.
        path: why the measured time took as long as it did.
        nodes: computations and passages, those of early steps left out.
    """

    case: Case
    step_end_s: tuple[float, ...]
    period_s: float
    measured_steps: int
    measured_from_s: float
    bubble: dict[str, float]
    stash_peak: tuple[int, ...]
    memory_peak_bytes: tuple[float, ...]
    links: tuple[LinkUse, ...]
    path: CriticalPath
    nodes: tuple[Node, ...]
    link_names: tuple[str, ...]

    @property
    def first_step_s(self) -> float:
        """Of the first step, whose pipeline begins empty."""
        return self.step_end_s[0]

    @property
    def end_s(self) -> float:
        return self.step_end_s[-1]


def play(case: Case, steps: int = STEPS, warm_up: int | None = None) -> Timeline:
    """Simulate some steps of a plan.

    Computations of a device, and messages of a link, take turns: first come, first served.
    A stage goes on to the next step as soon as it has updated and the coordinator, which
    lets `Case.ahead` steps be under way, allows it. Same case, same timeline.

    Args:
        case: stages, devices and network.
        steps: to play.
        warm_up: steps before those that are measured; a third unless given.

    Raises:
        PlanError: there is no step to measure.

    Time O(steps * stages * microbatches * log(stages)).

    Source: Graham, Bounds on multiprocessing timing anomalies, 1969: where two flows share
    a link or a processor, more speed may change which of two comes first, and a step may
    take longer for it. It is possible here too, but did not happen in 1200 random cases.
    """
    warm_up = steps // 3 if warm_up is None else warm_up
    if not (1 <= steps <= MAX_STEPS and 0 <= warm_up < steps):
        raise PlanError(
            f"{steps} steps with {warm_up} to warm up: 1 to {MAX_STEPS} can be played, and"
            " at least one must be left to measure"
        )
    since = warm_up - 1
    played = Engine(case, steps, max(0, since - case.ahead)).run()
    ends = tuple(end_s for end_s, _ in played.ends)
    since_s = ends[since] if warm_up else 0.0
    nodes = tuple(played.record.nodes)
    names = tuple(link.name for link in played.links)
    return Timeline(
        case=case,
        step_end_s=ends,
        period_s=(ends[-1] - since_s) / (steps - warm_up),
        measured_steps=steps - warm_up,
        measured_from_s=since_s,
        bubble=_bubbles(case, nodes, since_s, ends[-1]),
        stash_peak=played.stash_peak,
        memory_peak_bytes=_memory(case, played),
        links=_link_use(played, nodes, since_s, ends[-1]),
        path=walk_back(nodes, played.ends[-1][1], since_s, lambda n: _name(case, names, n)),
        nodes=nodes,
        link_names=names,
    )


def _name(case: Case, links: Sequence[str], node: Node) -> str:
    if node.kind == "link":
        return f"hop {node.hop}: {BROKER if links[node.place] == BROKER else 'links'}"
    if node.kind == "commit":
        return "the coordinator"
    return f"stage {node.place} on {case.stages[node.place].device}"


def _bubbles(
    case: Case, nodes: Sequence[Node], since_s: float, until_s: float
) -> dict[str, float]:
    busy_s = dict.fromkeys((stage.device for stage in case.stages), 0.0)
    for node in nodes:
        if node.kind == "compute":
            overhead_s = 0.0 if node.action.microbatch is None else case.network.op_s
            inside_s = _inside(node.start_s, node.end_s - overhead_s, since_s, until_s)
            busy_s[case.stages[node.place].device] += inside_s
    whole_s = until_s - since_s
    return {
        name: 1.0 - (s / whole_s if whole_s > 0.0 else 1.0) for name, s in busy_s.items()
    }


def _link_use(
    played: Played, nodes: Sequence[Node], since_s: float, until_s: float
) -> tuple[LinkUse, ...]:
    busy_s = [0.0] * len(played.links)
    for node in nodes:
        if node.kind == "link":
            busy_s[node.place] += _inside(node.start_s, node.end_s, since_s, until_s)
    whole_s = until_s - since_s
    return tuple(
        LinkUse(link.name, spent_s / whole_s if whole_s > 0.0 else 0.0, link.bytes)
        for link, spent_s in zip(played.links, busy_s, strict=True)
        if link.bytes > 0.0
    )


def _inside(start_s: float, end_s: float, since_s: float, until_s: float) -> float:
    return max(0.0, min(end_s, until_s) - max(start_s, since_s))


def _memory(case: Case, played: Played) -> tuple[float, ...]:
    return tuple(
        stage.memory_bytes + peak * stage.stash_bytes + waiting_bytes
        for stage, peak, waiting_bytes in zip(
            case.stages, played.stash_peak, played.waiting_peak_bytes, strict=True
        )
    )
