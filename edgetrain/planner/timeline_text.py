"""A timeline as text: a chart of what each stage does when, and what the time went into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from edgetrain.errors import PlanError
from edgetrain.planner.timeline import Timeline
from edgetrain.planner.timeline_nodes import Node
from edgetrain.schedules.actions import Op

COLUMNS: Final = 100
MIN_COLUMNS: Final = 40
_MOST_LABEL: Final = 24
_MOST_LINES: Final = 12
_IDLE: Final = "."


def text(timeline: Timeline, columns: int = COLUMNS) -> str:
    """Chart and summary, ready to print; no line is longer than `columns`."""
    return f"{chart(timeline, columns)}\n\n{summary(timeline, columns)}"


def chart(timeline: Timeline, columns: int = COLUMNS) -> str:
    """The last step, a line a stage: ``F5--`` is the forward of microbatch 5.

    Steps overlap, so the ends of a line may belong to a step's neighbours. A computation
    too short for its own column is left out where a longer one has it.
    """
    _check(columns)
    until_s = timeline.end_s
    since_s = max(0.0, until_s - timeline.period_s)
    stages = timeline.case.stages
    labels = [_cut(f"{s} {stage.device}", _MOST_LABEL) for s, stage in enumerate(stages)]
    wide = max(map(len, labels))
    room = columns - wide - 3
    lines = [_Line(room, since_s, until_s) for _ in stages]
    for node in timeline.nodes:
        if node.kind == "compute" and node.end_s > since_s:
            lines[node.place].draw(node)
    bars = [f"{a:<{wide}} |{line}|" for a, line in zip(labels, lines, strict=True)]
    scale = (
        f"{_seconds(timeline.period_s)}, {_seconds((until_s - since_s) / room)} a column"
    )
    head = f"{timeline.case.schedule}, {timeline.case.microbatches} microbatches: {scale}"
    return "\n".join([_cut(head, columns), *bars])


def summary(timeline: Timeline, columns: int = COLUMNS) -> str:
    """Step time, what it went into, and how busy devices and links are."""
    _check(columns)
    return "\n".join(_cut(line, columns) for line in _summary(timeline))


class _Line:
    """One stage's columns."""

    def __init__(self, room: int, since_s: float, until_s: float) -> None:
        self._cells = [_IDLE] * room
        self._since_s = since_s
        self._column_s = (until_s - since_s) / room

    def draw(self, node: Node) -> None:
        if self._column_s <= 0.0:
            return
        first = round((node.start_s - self._since_s) / self._column_s)
        end = round((node.end_s - self._since_s) / self._column_s)
        m = node.action.microbatch
        name = f"{node.action.op}{'' if m is None else m}"
        if len(name) > end - first:
            name = name[:1]
        fill = "=" if node.action.op is Op.BACKWARD else "-"
        drawn = name + fill * (end - first - len(name))
        for column in range(max(0, first), min(len(self._cells), end)):
            self._cells[column] = drawn[column - first]

    def __str__(self) -> str:
        return "".join(self._cells)


def _summary(timeline: Timeline) -> Iterator[str]:
    yield (
        f"A step takes {_seconds(timeline.period_s)}, the first"
        f" {_seconds(timeline.first_step_s)}; critical path:"
    )
    for share in timeline.path.shares[:_MOST_LINES]:
        yield f"  {share.share:6.1%}  {share.what}"
    left = timeline.path.shares[_MOST_LINES:]
    if left:
        yield f"  {sum(share.share for share in left):6.1%}  {len(left)} others"
    hops = timeline.path.hops / timeline.measured_steps
    yield f"  {hops:.3g} hops between stages are on it, a step"
    yield ""
    yield "stage  device                    busy  stashed  memory"
    for s, stage in enumerate(timeline.case.stages):
        busy = 1.0 - timeline.bubble[stage.device]
        memory = f"{timeline.memory_peak_bytes[s] / 1e6:.1f} MB"
        peak = timeline.stash_peak[s]
        yield f"{s:<6d} {_cut(stage.device, 24):<24} {busy:5.0%} {peak:8d}  {memory}"
    yield ""
    busiest = sorted(timeline.links, key=lambda link: (-link.busy, link.name))
    yield "links, the busiest first"
    for link in busiest[:_MOST_LINES]:
        yield f"  {link.busy:6.1%}  {link.name}: {link.bytes / 1e6:.2f} MB"
    if len(busiest) > _MOST_LINES:
        yield f"  and {len(busiest) - _MOST_LINES} others"


def _seconds(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: columns - 3]}..."


def _check(columns: int) -> None:
    if columns < MIN_COLUMNS:
        raise PlanError(f"{columns} columns: a timeline needs at least {MIN_COLUMNS}")
