"""What a stage does in a step, and the pass that adds the messages between stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """The kind of an action; the value is its short code."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"
    RECV_ACTIVATION = "RA"
    SEND_ACTIVATION = "SA"
    RECV_COTANGENT = "RC"
    SEND_COTANGENT = "SC"


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one stage. Prints as ``2F5``: stage 2, forward, microbatch 5.

    `microbatch` is None for an action that concerns the whole step, such as UPDATE.
    """

    stage: int
    op: Op
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"


# stage, stages, microbatches -> the compute actions of that stage, in order
StageActions = Callable[[int, int, int], Iterable[Action]]


def lower(actions: Iterable[Action], stages: int) -> Iterator[Action]:
    """Put receives before and sends after the compute actions of a stage.

    Every FORWARD is preceded by RECV_ACTIVATION, at stage 0 too: there it stands for the
    microbatch's input data, which the stage has to wait for like any other. The last
    stage sends no activation and receives no cotangent; stage 0 sends no cotangent.

    The result is free of deadlock only where a send never waits for its receiver, as is
    the case over a broker. A transport that blocks needs its sends and receives paired.
    """
    for action in actions:
        stage, m = action.stage, action.microbatch
        is_last = stage == stages - 1
        match action.op:
            case Op.FORWARD:
                yield Action(stage, Op.RECV_ACTIVATION, m)
                yield action
                if not is_last:
                    yield Action(stage, Op.SEND_ACTIVATION, m)
            case Op.BACKWARD:
                if not is_last:
                    yield Action(stage, Op.RECV_COTANGENT, m)
                yield action
                if stage > 0:
                    yield Action(stage, Op.SEND_COTANGENT, m)
            case _:
                yield action


def text(actions: Iterable[Action]) -> str:
    """The golden form of a schedule: ``0F0 0F1 0B0 ...``."""
    return " ".join(str(action) for action in actions)
