"""A timeline as a Chrome trace, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from edgetrain.planner.timeline import Timeline
from edgetrain.planner.timeline_links import BROKER, DOWN, UP
from edgetrain.planner.timeline_nodes import Node

_US_PER_S: Final = 1e6
# Rows of links come after those of stages, whose numbers are below.
_LINK_ROWS: Final = {UP: 10_000, DOWN: 10_001, BROKER: 10_002}

Event = dict[str, object]


def chrome_trace(timeline: Timeline) -> str:
    """JSON text: a process a device, a row a stage and a direction of its link.

    Microseconds. An event's `args` hold its step; those on the critical path say so.
    """
    events = [*_names(timeline), *_events(timeline)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _processes(timeline: Timeline) -> dict[str, int]:
    case = timeline.case
    names = [*(device.name for device in case.devices), case.coordinator.name, BROKER]
    return {name: number for number, name in enumerate(names, 1)}


def _rows(timeline: Timeline) -> Iterator[tuple[int, int, str]]:
    """Process and number of every row, and its name."""
    processes = _processes(timeline)
    for s, stage in enumerate(timeline.case.stages):
        yield processes[stage.device], s, f"stage {s}"
    for number, name in enumerate(timeline.link_names):
        process, row = _link_row(timeline, number)
        yield process, row, name.rpartition(" ")[2]


def _link_row(timeline: Timeline, number: int) -> tuple[int, int]:
    device, _, way = timeline.link_names[number].rpartition(" ")
    return _processes(timeline)[device or BROKER], _LINK_ROWS[way]


def _names(timeline: Timeline) -> Iterator[Event]:
    rows = list(_rows(timeline))
    used = {process for process, _, _ in rows}
    for name, process in _processes(timeline).items():
        if process in used:
            yield _name("process_name", name, process, 0)
    for process, row, name in rows:
        yield _name("thread_name", name, process, row)


def _name(kind: str, name: str, process: int, row: int) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}


def _events(timeline: Timeline) -> Iterator[Event]:
    critical = frozenset(timeline.path.nodes)
    processes = _processes(timeline)
    links = [_link_row(timeline, n) for n in range(len(timeline.link_names))]
    for number, node in enumerate(timeline.nodes):
        if node.kind == "commit":
            continue
        if node.kind == "link":
            process, row = links[node.place]
        else:
            process, row = processes[timeline.case.stages[node.place].device], node.place
        yield {
            "ph": "X",
            "name": str(node.action) if node.hop is None else f"{node.hop} {node.action}",
            "cat": _category(node),
            "pid": process,
            "tid": row,
            "ts": node.start_s * _US_PER_S,
            "dur": (node.end_s - node.start_s) * _US_PER_S,
            "args": {"step": node.step, "critical": number in critical},
        }


def _category(node: Node) -> str:
    return node.action.op.name.lower() if node.hop is None else "link"
