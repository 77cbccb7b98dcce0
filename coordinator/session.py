"""One training run: from a run file and a fleet to a trained ONNX file."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from coordinator.comparison import STEP, Comparison, compare
from coordinator.deployed import Deployed
from coordinator.drive import Drive
from coordinator.figures import DeviceRow
from coordinator.fleet import Fleet
from coordinator.gate import Gate
from coordinator.job import Job, prepare
from coordinator.metrics import (
    METRICS_FILE,
    GateMetrics,
    MoveMetrics,
    read_lines,
    read_metrics,
)
from coordinator.mover import Course, Mover
from coordinator.pipeline_loop import Pipeline, PipelineLoop
from coordinator.profile_cache import NO_CACHE, ProfileCache
from coordinator.recorder import Recorder
from coordinator.report import Report, render
from coordinator.rollout import Rollout
from coordinator.run_folder import RunFolder, resolved_toml
from coordinator.score import Score
from coordinator.settle import for_fleet
from coordinator.watch import Watch
from edgetrain.config import RunConfig
from edgetrain.plan import Plan
from edgetrain.runtime.fallback import gated
from edgetrain.runtime.outbox import Outbox
from edgetrain.transport.base import Transport
from edgetrain.wire.hello import Hello
from edgetrain.wire.signature import Signer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        folder: of the run.
        model: the trained file.
        steps: done, of those asked for.
        score: of the last evaluation.
        interrupted: it was stopped before its end.
        rows: what each device did.
        remarks: what the user should know of model and data.
        comparisons: what the last plan predicted beside what was measured.
    """

    folder: Path
    model: Path
    steps: int
    score: Score | None
    interrupted: bool
    rows: tuple[DeviceRow, ...]
    remarks: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()

    @property
    def step(self) -> Comparison | None:
        """Of a whole step; None if none was done."""
        return next((c for c in self.comparisons if c.what == STEP), None)


class Session:
    """Runs one job on one fleet.

    Args:
        job: what to train.
        transport: the coordinator's, not yet open.
        watch: who looks on.
        cache: of what earlier runs measured, for this one and those to come.
        signer: of commands to devices that take no others.
    """

    def __init__(
        self,
        job: Job,
        transport: Transport,
        watch: Watch,
        cache: ProfileCache = NO_CACHE,
        *,
        signer: Signer | None = None,
    ) -> None:
        self._cache = cache
        self._job = job
        self._fleet = Fleet(transport, signer)
        self._watch = watch
        inbox, undelivered = self._fleet.inbox, self._fleet.undelivered
        self._outbox = Outbox(transport, inbox, lambda _: None, undelivered)
        self._run = secrets.randbits(32)

    def train(self, out: Path | None) -> Outcome:
        """Plan, deploy, train, evaluate, and write the run folder.

        Raises:
            InputError: the plan cannot be made.
            RunError: the run failed; the folder keeps the last weights that were good.
        """
        wanted = self._job.config.fleet
        try:
            self._fleet.open()
            devices = self._fleet.wait(wanted.names, wanted.count, wanted.wait_s)
            self._job = for_fleet(self._job, devices, self._cache)
            rollout = self._rollout()
            try:
                return self._run_on(rollout, devices, out)
            finally:
                rollout.release()
        finally:
            self._outbox.close()
            self._fleet.close()

    def _rollout(self) -> Rollout:
        clock = self._watch.clock
        return Rollout(self._job, self._fleet, self._outbox, self._run, clock=clock)

    def _run_on(
        self, rollout: Rollout, devices: Mapping[str, Hello], out: Path | None
    ) -> Outcome:
        config = self._job.config
        supply = rollout.supply(devices)
        total = config.train.total_steps(supply.order.steps_per_epoch)
        planner = rollout.planner(devices, supply, self._cache)
        deployed = rollout.begin(planner, supply, total)
        course = Course(rollout, planner, supply, total, self._watch.clock)
        now = datetime.now().astimezone()
        folder = RunFolder.create(out, stem=config.model.path.stem, now=now)
        with closing(folder):
            folder.write_config(config)
            return self._drive(folder, course, deployed)

    def _drive(self, folder: RunFolder, course: Course, deployed: Deployed) -> Outcome:
        """The loop itself, and what is written whichever way it ends."""
        watch, total = self._watch, course.total_steps
        pipeline = course.rollout.pipeline(deployed, course.supply)
        recorder = Recorder(folder, watch.progress, watch.clock)
        recorder.begin(course.plan(deployed), total, pipeline.order.steps_per_epoch)
        loop = PipelineLoop(self._fleet, pipeline, recorder, watch.stopped)
        mover = Mover(course, deployed, allowed=self._may_move)
        try:
            gate = Gate(loop, _gated(pipeline), total, recorder)
            drive = Drive(self._job, watch, folder, recorder)
            model = drive.train(loop, gate, mover)
        finally:
            watch.progress.close()
            rows = tuple(recorder.rows(loop.tally))
            comparisons = compare(recorder.plan, loop.tally, mover.replay_s(loop.tally))
            self._write_report(folder, recorder.plan, rows, comparisons)
        steps = loop.tally.committed + 1
        remarks = (*recorder.plan.remarks, *self._job.data.remarks, *recorder.remarks)
        return Outcome(
            folder.path,
            model,
            steps,
            recorder.score,
            steps < total,
            rows,
            remarks,
            comparisons,
        )

    @property
    def _may_move(self) -> bool:
        return self._job.config.plan.replan and not self._job.config.plan.cuts

    def _write_report(
        self,
        folder: RunFolder,
        plan: Plan,
        rows: tuple[DeviceRow, ...],
        comparisons: tuple[Comparison, ...],
    ) -> None:
        path = folder.path / METRICS_FILE
        steps, evaluations = read_metrics(path)
        report = Report(
            folder.path.name,
            steps,
            evaluations,
            rows,
            plan.encode().decode(),
            resolved_toml(self._job.config),
            read_lines(path, GateMetrics),
            read_lines(path, MoveMetrics),
            comparisons,
        )
        folder.write_report(render(report))


def _gated(pipeline: Pipeline) -> tuple[int, ...]:
    """The stages that keep their deployed weights, to be compared with."""
    return tuple(m.stage for m in pipeline.manifests if gated(m))


def train(
    config: RunConfig, transport: Transport, watch: Watch, out: Path | None
) -> Outcome:
    """Check everything, then run it: see `Session.train`."""
    return Session(prepare(config), transport, watch).train(out)
