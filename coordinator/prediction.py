"""What a plan should take, step by step, if devices and links are as known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.assignment import Assignment
from coordinator.network import HOP_OVERHEAD_S, DeviceLink
from coordinator.stage_costs import StageTimes
from edgetrain.schedules.table import SCHEDULES
from edgetrain.schedules.validate import Times, simulate


@dataclass(frozen=True, slots=True)
class PredictedHop:
    """What crosses a cut: bytes of a microbatch, down and back up."""

    down_bytes: int
    up_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one plan.

    Attributes:
        step_s: from one step to the next.
        times: of each stage.
        hops: over each cut.
        hop_s: of one microbatch over each cut, there and back, if nothing is in its way.
    """

    step_s: float
    times: tuple[StageTimes, ...]
    hops: tuple[PredictedHop, ...]
    hop_s: tuple[float, ...]


def predict(
    assignment: Assignment,
    times: Sequence[StageTimes],
    hops: Sequence[PredictedHop],
    links: Sequence[DeviceLink],
) -> Prediction:
    """Play the plan out.

    Args:
        assignment: schedule and microbatches.
        times: of its stages.
        hops: over its cuts, one fewer than stages.
        links: of the stages' devices.
    """
    down_s, up_s = [], []
    for number, hop in enumerate(hops):
        near, far = links[number], links[number + 1]
        down_s.append(_hop_s(hop.down_bytes, near, far))
        up_s.append(_hop_s(hop.up_bytes, far, near))
    play = simulate(
        SCHEDULES[assignment.schedule],
        assignment.microbatches,
        Times(
            [t.forward_s for t in times],
            [t.backward_s for t in times],
            [(d + u) / 2 for d, u in zip(down_s, up_s, strict=True)],
        ),
    )
    step_s = play.period_s + max(t.update_s for t in times)
    hop_s = tuple(d + u for d, u in zip(down_s, up_s, strict=True))
    return Prediction(step_s, tuple(times), tuple(hops), hop_s)


def _hop_s(nbytes: int, sender: DeviceLink, receiver: DeviceLink) -> float:
    rate = min(sender.bytes_per_s, receiver.bytes_per_s)
    return HOP_OVERHEAD_S + sender.latency_s + receiver.latency_s + nbytes / rate
