"""Fleets on a virtual clock: hundreds of devices on one machine, the same every time.

Devices are described as for real slowed agents; the timeline's engine plays them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edgetrain.conditions import Conditions, Happening
from edgetrain.errors import PlanError
from edgetrain.planner.timeline import Timeline, play
from edgetrain.planner.timeline_case import Case, Changes, TimedDevice, TimedStage

LAST_STEPS: Final = 4  # whose computations and passages are kept


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Steps on a virtual clock.

    Attributes:
        step_end_s: of the steps that ended before a device was killed, if one was.
        killed: the first device that the timetable ends, if it does so during the steps.
        killed_at_s: when; infinite if none.
        timeline: of all steps, as if no device had been killed.
    """

    step_end_s: tuple[float, ...]
    killed: str | None
    killed_at_s: float
    timeline: Timeline

    def period_s(self, first: int, last: int) -> float:
        """Mean seconds a step, of steps `first` to `last`, both included.

        Raises:
            PlanError: those steps did not end.
        """
        if not 0 <= first <= last < len(self.step_end_s):
            raise PlanError(
                f"steps {first} to {last} of {len(self.step_end_s)} that ended: choose a"
                " first and a last one among them"
            )
        start_s = self.step_end_s[first - 1] if first else 0.0
        return (self.step_end_s[last] - start_s) / (last - first + 1)


def rehearse(case: Case, conditions: Mapping[str, Conditions], steps: int) -> Rehearsal:
    """Play steps on devices that are slowed, late, or fail by a timetable.

    Args:
        case: its stages' times are those of a device at speed 1.
        conditions: by the name of the device; others stay as the case has them. `paced`
            takes the place of the stages' times. Seeds of jitter and loss are the case's.
        steps: to play.

    Raises:
        PlanError: a name that is no device's, or no steps.
    """
    names = [device.name for device in case.devices]
    for name in conditions:
        if name not in names:
            raise PlanError(
                f"conditions for device {name!r}, which is not among {', '.join(names)}"
            )
    under = dataclasses.replace(
        case,
        devices=tuple(
            timed_device(device.name, conditions[device.name])
            if device.name in conditions
            else device
            for device in case.devices
        ),
        stages=tuple(_paced(s, conditions.get(s.device)) for s in case.stages),
    )
    timeline = play(under, steps, max(0, steps - LAST_STEPS))
    killed_at_s, killed = min(_kills(conditions), default=(math.inf, None))
    ends = tuple(end_s for end_s in timeline.step_end_s if end_s < killed_at_s)
    if len(ends) == steps:
        killed_at_s, killed = math.inf, None
    return Rehearsal(ends, killed, killed_at_s, timeline)


def timed_device(name: str, conditions: Conditions) -> TimedDevice:
    """What the timeline makes of a device under conditions.

    Its timetable counts from the beginning of the first step.
    """
    rate = conditions.link_bytes_per_s
    happenings = sorted(conditions.timetable, key=lambda happening: happening.at_s)
    speeds = [(0.0, conditions.speed)]
    speeds += [(h.at_s, h.speed) for h in happenings if h.speed is not None]
    return TimedDevice(
        name,
        uplink_bytes_per_s=rate,
        downlink_bytes_per_s=rate,
        latency_s=conditions.latency_s,
        jitter_s=conditions.jitter_s,
        loss=conditions.loss,
        speeds=tuple(dict(speeds).items()),
        link_rates=_rates(rate, happenings),
    )


def _rates(first: float, happenings: Sequence[Happening]) -> Changes:
    """Bytes/s from each moment on, 0 in an outage."""
    changes = [(0.0, first)]
    outages = []
    for happening in happenings:
        if happening.link_bytes_per_s is not None:
            changes.append((happening.at_s, happening.link_bytes_per_s))
        if happening.down_s:
            outages.append((happening.at_s, happening.at_s + happening.down_s))
    moments = {at_s for at_s, _ in changes} | {at_s for span in outages for at_s in span}
    return tuple(
        (
            at_s,
            0.0
            if any(start_s <= at_s < end_s for start_s, end_s in outages)
            else [rate for since_s, rate in changes if since_s <= at_s][-1],
        )
        for at_s in sorted(moments)
    )


def _paced(stage: TimedStage, conditions: Conditions | None) -> TimedStage:
    if conditions is None or conditions.paced is None:
        return stage
    forward_s, backward_s = conditions.paced
    return dataclasses.replace(stage, forward_s=forward_s, backward_s=backward_s)


def _kills(conditions: Mapping[str, Conditions]) -> Iterator[tuple[float, str]]:
    for name, condition in conditions.items():
        for happening in condition.timetable:
            if happening.kill:
                yield happening.at_s, name
