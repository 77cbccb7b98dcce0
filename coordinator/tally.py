"""What the devices' reports add up to."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from edgetrain.wire.messages import StepDone

RECENT_STEPS = 20


@dataclass(frozen=True, slots=True)
class StepTotal:
    """One committed step.

    Attributes:
        loss: mean over the batch.
        sent_bytes: by all devices and the coordinator.
        signals: signal to noise of each stage's gradients; 0 where they are exact.
    """

    step: int
    loss: float
    samples: int
    sent_bytes: int
    signals: tuple[float, ...] = ()


@dataclass(slots=True)
class StageTotals:
    """One stage since the run began, and lately."""

    seconds: float = 0.0
    compute_s: float = 0.0
    sent_bytes: int = 0
    stash_peak_bytes: int = 0
    memory_peak_bytes: int = 0
    activation_peak_bytes: int = 0
    steps: int = 0
    signal_to_noise: float = 0.0
    away_s: float = 0.0
    turnaround_s: float = 0.0
    recent: deque[StepDone] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def add(self, done: StepDone) -> None:
        self.steps += 1
        self.seconds += done.seconds
        self.compute_s += done.compute_s
        self.sent_bytes += done.sent_bytes
        self.stash_peak_bytes = max(self.stash_peak_bytes, done.stash_peak_bytes)
        self.memory_peak_bytes = max(self.memory_peak_bytes, done.memory_peak_bytes)
        self.signal_to_noise = done.signal_to_noise
        peak_bytes = max(self.activation_peak_bytes, done.activation_peak_bytes)
        self.activation_peak_bytes = peak_bytes
        self.away_s += done.away_s
        self.turnaround_s += done.turnaround_s
        self.recent.append(done)

    @property
    def busy(self) -> float:
        """Share of the time it computed, over all steps."""
        return self.compute_s / self.seconds if self.seconds else 0.0

    @property
    def step_s(self) -> float | None:
        """From one update to the next, as lately; None before the first."""
        return statistics.median(d.seconds for d in self.recent) if self.recent else None

    @property
    def recently_busy(self) -> float:
        seconds = sum(done.seconds for done in self.recent)
        return sum(d.compute_s for d in self.recent) / seconds if seconds else 0.0


class Tally:
    """Collects the stages' reports; a step is committed once all have reported it."""

    def __init__(self, stages: int) -> None:
        self.stages = [StageTotals() for _ in range(stages)]
        self.committed = -1
        self._open: dict[int, dict[int, StepDone]] = {}

    def add(self, done: StepDone) -> StepTotal | None:
        """Take in a report; the step's total when it completes the step."""
        if done.step <= self.committed or not 0 <= done.stage < len(self.stages):
            return None
        reports = self._open.setdefault(done.step, {})
        if done.stage in reports:
            return None
        reports[done.stage] = done
        self.stages[done.stage].add(done)
        if len(reports) < len(self.stages) or done.step != self.committed + 1:
            return None
        self.committed = done.step
        reports = self._open.pop(done.step)
        samples = sum(report.samples for report in reports.values())
        loss_sum = sum(report.loss_sum for report in reports.values())
        sent_bytes = sum(report.sent_bytes for report in reports.values())
        signals = tuple(reports[n].signal_to_noise for n in range(len(self.stages)))
        loss = loss_sum / max(1, samples)
        return StepTotal(done.step, loss, samples, sent_bytes, signals)

    def hop_s(self, hop: int) -> float | None:
        """What the hops between a stage and the next took of a step, there and back.

        None where nothing comes back, or no step was done.
        """
        near, far = self.stages[hop], self.stages[hop + 1]
        if not (near.steps and near.away_s):
            return None
        return max(0.0, near.away_s / near.steps - far.turnaround_s / max(1, far.steps))

    def restart(self, stages: int) -> None:
        """Count anew, for another plan that goes on after the last committed step."""
        self.stages = [StageTotals() for _ in range(stages)]
        self._open.clear()

    def behind(self) -> list[int]:
        """The stages whose report of the next step is missing."""
        reports = self._open.get(self.committed + 1, {})
        return [stage for stage in range(len(self.stages)) if stage not in reports]
