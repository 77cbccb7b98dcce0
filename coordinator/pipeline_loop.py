"""Drives a deployed pipeline: steps, evaluations, and fetching the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from coordinator.feed import Feed
from coordinator.fleet import Event, Fleet, Gone, Said, Undelivered
from coordinator.reminder import Reminder
from coordinator.score import Measured, Score, score_of
from coordinator.tally import StepTotal, Tally
from coordinator.weights import Weights, unpack
from edgetrain.errors import DeviceError, DivergedError, FleetError
from edgetrain.manifest import Manifest
from edgetrain.runtime.parameters import RUN_AHEAD
from edgetrain.samples import BatchOrder
from edgetrain.stage_state import ModelState, StageState, join
from edgetrain.wire.frame import Kind
from edgetrain.wire.messages import (
    Command,
    Evaluate,
    Evaluated,
    Failed,
    Fetch,
    GradientNorm,
    NormTotal,
    Revert,
    StepDone,
    Train,
)
from edgetrain.wire.reassembly import Message

LAG: Final = RUN_AHEAD  # steps that may be under way beyond the last committed one
EVALUATION_BLOCK: Final = 32  # microbatches
BLOCKS_UNDER_WAY: Final = 2


class Watcher(Protocol):
    """Is told what happens."""

    def stepped(self, total: StepTotal, tally: Tally) -> None: ...

    def evaluated(self, step: int, score: Score) -> None: ...


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A deployed plan.

    Attributes:
        devices, manifests: of the stages, in order.
        order: which samples each step takes.
        feed: sends them, where the coordinator has them.
        evaluation_samples: 0: there is nothing to evaluate on.
        timeout_s: longest silence that is not a failure.
    """

    run: int
    epoch: int
    devices: tuple[str, ...]
    manifests: tuple[Manifest, ...]
    order: BatchOrder
    feed: Feed | None
    evaluation_samples: int
    timeout_s: float


class PipelineLoop:
    """Keeps a pipeline busy.

    Attributes:
        first_step: of the plan in force.
        tally: what its stages have reported.

    Args:
        fleet: carries commands and events.
        pipeline: what is driven.
        watcher: is told of each step and evaluation.
        stopped: asked between steps; True ends training early.
    """

    def __init__(
        self,
        fleet: Fleet,
        pipeline: Pipeline,
        watcher: Watcher,
        stopped: Callable[[], bool],
    ) -> None:
        self._fleet = fleet
        self._pipeline = pipeline
        self.first_step = 0
        self._watcher = watcher
        self._stopped = stopped
        self._reminder = Reminder(fleet, self._send)
        self._allowed = -1
        self._block = 0
        self._norms: dict[int, dict[int, float]] = {}
        self.tally = Tally(len(pipeline.devices))

    @property
    def steps_per_epoch(self) -> int:
        return self._pipeline.order.steps_per_epoch

    def train_until(self, step: int, pause: Callable[[], bool] = lambda: False) -> None:
        """Run all steps before `step`, or until stopped; ends between two steps.

        Args:
            step: the first one that is not run.
            pause: asked after each step; True ends the call early.

        Raises:
            DivergedError: a loss is not finite.
            DeviceError: a device failed or went away.
            RunError: nothing happened for too long.
        """
        while self.tally.committed + 1 < step:
            if not pause():
                self._extend(step)
            if self._allowed == self.tally.committed:
                return  # stopped, or paused
            self._handle(self._event())

    def evaluate(self, *, each: bool = False) -> Measured | None:
        """Run the evaluation samples through the present weights; None without samples."""
        if not self._pipeline.evaluation_samples:
            return None
        measured = self.measure(each=each)
        self._watcher.evaluated(self.tally.committed + 1, measured.score)
        return measured

    def measure(self, *, each: bool = False) -> Measured:
        """As `evaluate`, without telling the watcher."""
        left = self._pipeline.evaluation_samples
        microbatch = self._pipeline.manifests[0].microbatch
        waiting: list[int] = []
        done: list[Evaluated] = []
        first = 0
        while left or waiting:
            while left and len(waiting) < BLOCKS_UNDER_WAY:
                samples = min(left, EVALUATION_BLOCK * microbatch)
                waiting.append(self._start_block(first, samples, each=each))
                first += -(-samples // microbatch)
                left -= samples
            event = self._event()
            if isinstance(event, Said) and isinstance(event.report, Evaluated):
                if event.report.block in waiting:
                    waiting.remove(event.report.block)
                    done.append(event.report)
            else:
                self._handle(event)
        done.sort(key=lambda part: part.block)
        scores = b"".join(part.scores for part in done)
        return Measured(score_of(done), np.frombuffer(scores, np.float32))

    def revert(self, stage: int, action: str) -> None:
        """See `Revert`; between steps and evaluations only."""
        p = self._pipeline
        command = Revert(p.run, p.epoch, stage, action)
        self._fleet.command(p.devices[stage], command)

    def weights(self, step: int | None = None) -> Weights:
        """Collect the weights after a step (-1: as deployed), by default the last one.

        Raises:
            DeviceError, RunError: as `train_until`.
        """
        p = self._pipeline
        step = self.tally.committed if step is None else step
        messages = self._collect(Kind.WEIGHTS, Fetch(p.run, p.epoch, step))
        parts = map(unpack, p.manifests, messages)
        return {name: array for part in parts for name, array in part.items()}

    def state(self) -> ModelState:
        """Collect all that the next step needs; between two steps only.

        Raises:
            DeviceError, RunError: as `train_until`.
            BundleError: a stage sent something else.
        """
        p = self._pipeline
        fetch = Fetch(p.run, p.epoch, self.tally.committed, state=True)
        messages = self._collect(Kind.STATE, fetch)
        states = [
            StageState.decode(message.body, manifest)
            for message, manifest in zip(messages, p.manifests, strict=True)
        ]
        return join(states, p.manifests)

    def move(self, pipeline: Pipeline) -> None:
        """Go on with another plan from the next step; between two steps only."""
        self._pipeline = pipeline
        self._allowed = self.tally.committed
        self.first_step = self._allowed + 1
        self._norms.clear()
        self._reminder.forget()
        self.tally.restart(len(pipeline.devices))

    def _collect(self, kind: Kind, fetch: Fetch) -> list[Message]:
        """What each stage sends in answer, in pipeline order."""
        self._reminder.command(fetch)
        parts: dict[int, Message] = {}
        stages = range(len(self._pipeline.devices))
        while len(parts) < len(stages):
            event = self._event()
            if isinstance(event, Message):
                a = event.address
                wanted = (kind, fetch.run, fetch.epoch, fetch.step + 1)
                if (a.kind, a.run, a.epoch, a.step) == wanted and a.stage in stages:
                    parts[a.stage] = event
            elif not (isinstance(event, Said) and isinstance(event.report, Failed)):
                self._handle(event)
        return [parts[stage] for stage in stages]

    def _extend(self, step: int) -> None:
        """Allow and feed more steps, a few beyond the committed one."""
        if self._stopped():
            return
        last = min(self.tally.committed + LAG, step - 1)
        if last > self._allowed:
            p = self._pipeline
            self._reminder.command(Train(p.run, p.epoch, last))
            for number in range(self._allowed + 1, last + 1):
                if p.feed is not None:
                    p.feed.training(number, p.order)
            self._allowed = last

    def _start_block(self, first: int, samples: int, *, each: bool) -> int:
        p = self._pipeline
        self._block += 1
        microbatches = -(-samples // p.manifests[0].microbatch)
        block = (p.run, p.epoch, self._block, first, microbatches, samples)
        self._reminder.command(Evaluate(*block, each))
        if p.feed is not None:
            p.feed.evaluation(self._block, range(first, first + microbatches))
        return self._block

    def _event(self) -> Event:
        event = self._reminder.event(self._pipeline.timeout_s)
        if event is None:
            late = [self._pipeline.devices[stage] for stage in self.tally.behind()]
            raise FleetError(
                f"nothing happened for {self._pipeline.timeout_s:g} s; step"
                f" {self.tally.committed + 2} waits for {', '.join(late)}: see the log of"
                " that agent, or raise [fleet] step_timeout_s"
            )
        return event

    def _handle(self, event: Event) -> None:
        match event:
            case Gone(device) if device in self._pipeline.devices:
                raise DeviceError(device, "its connection ended during the run")
            case Undelivered(device, run, epoch, reason):
                if (run, epoch) == (self._pipeline.run, self._pipeline.epoch):
                    raise DeviceError(device, reason)
            case Said(device, report):
                if (report.run, report.epoch) != (self._pipeline.run, self._pipeline.epoch):
                    return
                self._hear(device, report)
            case _:
                pass

    def _hear(self, device: str, report: object) -> None:
        match report:
            case StepDone():
                total = self.tally.add(report)
                if total is not None:
                    self._watcher.stepped(self._with_fed(total), self.tally)
            case GradientNorm():
                self._add_norm(report)
            case Failed(diverged=True, step=step):
                raise DivergedError(step)
            case Failed(reason=reason):
                raise DeviceError(device, reason)

    def _with_fed(self, total: StepTotal) -> StepTotal:
        """With what the coordinator itself sent for the step."""
        feed = self._pipeline.feed
        fed_bytes = feed.sent_for(total.step) if feed is not None else 0
        return replace(total, sent_bytes=total.sent_bytes + fed_bytes)

    def _add_norm(self, part: GradientNorm) -> None:
        """Send the whole model's square sum once all stages have given theirs."""
        parts = self._norms.setdefault(part.step, {})
        parts[part.stage] = part.square_sum
        if len(parts) == len(self._pipeline.devices):
            total = math.fsum(self._norms.pop(part.step).values())
            p = self._pipeline
            self._reminder.command(NormTotal(p.run, p.epoch, part.step, total))

    def _send(self, command: Command) -> None:
        for device in dict.fromkeys(self._pipeline.devices):
            self._fleet.command(device, command)
