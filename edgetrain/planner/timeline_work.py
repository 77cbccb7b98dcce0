"""A stage's computations in order, the tensors they need and the messages they make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from edgetrain.planner.timeline_case import Case
from edgetrain.schedules.actions import Action, Op, lower
from edgetrain.schedules.table import SCHEDULES

LABELS: Final = "labels"
_RECEIVES: Final = (Op.RECV_ACTIVATION, Op.RECV_COTANGENT)


class Sent(NamedTuple):
    """What a computation gives: to which stage, as what, and how large."""

    to: int
    kind: str
    nbytes: float


@dataclass(slots=True)
class Work:
    """One computation of a stage, the tensors it needs and the messages it makes."""

    action: Action
    work_s: float
    overhead_s: float
    needs: list[str]
    sends: list[Sent]
    sends_first: list[Sent]


def works(case: Case, number: int) -> Iterator[Work]:
    """The computations of a stage, from its schedule's lowered actions."""
    stages = len(case.stages)
    schedule = SCHEDULES[case.schedule]
    needs: list[str] = []
    work: Work | None = None
    for action in lower(schedule(number, stages, case.microbatches), stages):
        if action.op in _RECEIVES:
            needs.append(action.op)
        elif work is not None and action.op is Op.SEND_ACTIVATION:
            nbytes = case.stages[number].output_bytes
            work.sends.append(Sent(number + 1, Op.RECV_ACTIVATION, nbytes))
        elif work is not None and action.op is Op.SEND_COTANGENT:
            nbytes = case.stages[number].cotangent_bytes
            work.sends.append(Sent(number - 1, Op.RECV_COTANGENT, nbytes))
        else:
            if work is not None:
                yield work
            work, needs = _work(case, action, needs), []
    if work is not None:
        yield work


def _work(case: Case, action: Action, needs: list[str]) -> Work:
    """One computation, its messages not yet among what it sends."""
    stage, number = case.stages[action.stage], action.stage
    last = number == len(case.stages) - 1
    local = case.data_on == "first"
    work_s, overhead_s, sends_first = stage.update_s, 0.0, []
    if action.op is not Op.UPDATE:
        overhead_s = case.network.op_s
    if action.op is Op.FORWARD:
        work_s = (
            stage.forward_s + stage.decode_s * (number > 0) + stage.encode_s * (not last)
        )
        if number == 0 and local:
            needs = []
            if SCHEDULES[case.schedule].updates:
                sends_first = [Sent(len(case.stages) - 1, LABELS, case.label_bytes)]
    if action.op is Op.BACKWARD:
        work_s = (
            stage.backward_s + stage.decode_s * (not last) + stage.encode_s * (number > 0)
        )
        if last:
            needs = [*needs, LABELS]
    return Work(action, work_s, overhead_s, needs, [], sends_first)
