"""The lines of a run's ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from edgetrain.errors import DataError

METRICS_FILE: Final = "metrics.jsonl"


class StepMetrics(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of ``metrics.jsonl`` for a step.

    Attributes:
        step: from 1: steps done.
        epoch: from 0.
        loss: mean over the batch; None: not finite.
        seconds: since the run began.
        bytes_sent: by all devices and the coordinator in this step.
        signal_to_noise: of each stage's gradients, 0 where exact; left out if all are.
    """

    step: int
    epoch: int
    loss: float | None
    seconds: float
    bytes_sent: int
    signal_to_noise: tuple[float, ...] = ()


class EvalMetrics(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of ``metrics.jsonl`` for an evaluation; no accuracy for value labels."""

    step: int
    epoch: int
    seconds: float
    eval_loss: float | None
    eval_accuracy: float | None = None


class GateMetrics(msgspec.Struct, frozen=True):
    """A line of ``metrics.jsonl`` for a stage compared with its deployed weights.

    Attributes:
        gate_stage: its number.
        gate_measure: ``"accuracy"`` or ``"loss"``.
        gate_trained, gate_deployed: of the whole model, with either; None: not finite.
        rolled_back: the stage went back to its deployed weights.
    """

    step: int
    gate_stage: int
    gate_measure: str
    gate_trained: float | None
    gate_deployed: float | None
    rolled_back: bool


class MoveMetrics(msgspec.Struct, frozen=True):
    """A line of ``metrics.jsonl`` for a plan that took another one's place.

    Attributes:
        step: steps done under the plans before.
        move_devices: of the new plan, in pipeline order.
        move_reason: what had changed, one sentence.
        stayed_s, moved_s: predicted for a step from then on, with either plan.
        pause_s: that no step was under way.
    """

    step: int
    move_devices: tuple[str, ...]
    move_reason: str
    stayed_s: float
    moved_s: float
    pause_s: float


Metrics = StepMetrics | EvalMetrics | GateMetrics | MoveMetrics
_Kind = TypeVar("_Kind", StepMetrics, EvalMetrics, GateMetrics, MoveMetrics)

# What tells a kind of line from the others; steps have none of it.
_MARKS: Final[Mapping[bytes, type[Metrics]]] = {
    b'"eval_loss"': EvalMetrics,
    b'"gate_stage"': GateMetrics,
    b'"move_devices"': MoveMetrics,
}


def read_metrics(path: Path) -> tuple[list[StepMetrics], list[EvalMetrics]]:
    """Read ``metrics.jsonl``; a last line cut short by a crash is left out.

    Raises:
        DataError: it cannot be read, or another line is damaged.
    """
    return read_lines(path, StepMetrics), read_lines(path, EvalMetrics)


def read_lines(path: Path, kind: type[_Kind]) -> list[_Kind]:
    """As `read_metrics`, the lines of one kind."""
    return [line for line in _metrics(path) if isinstance(line, kind)]


def _metrics(path: Path) -> Iterator[Metrics]:
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        kind = next((k for mark, k in _MARKS.items() if mark in line), StepMetrics)
        try:
            yield msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: line {number} is damaged: {error}") from error
