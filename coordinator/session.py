"""One training run: from a run file and a fleet to a trained ONNX file."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from coordinator.figures import DeviceRow
from coordinator.fleet import Fleet
from coordinator.gate import Gate
from coordinator.job import Job, prepare
from coordinator.pipeline_loop import Pipeline, PipelineLoop
from coordinator.progress import Progress
from coordinator.recorder import Recorder
from coordinator.report import Report, render
from coordinator.rollout import Rollout
from coordinator.run_folder import (
    METRICS_FILE,
    MODEL_FILE,
    RunFolder,
    read_gates,
    read_metrics,
    resolved_toml,
)
from coordinator.score import Score
from coordinator.weights import Weights
from edgetrain.config import RunConfig
from edgetrain.errors import DivergedError, RunError
from edgetrain.plan import Plan
from edgetrain.runtime.fallback import gated
from edgetrain.runtime.outbox import Outbox
from edgetrain.transport.base import Transport

log = logging.getLogger(__name__)

KEEP_EVERY_S: Final = 2.0


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
    """

    folder: Path
    model: Path
    steps: int
    score: Score | None
    interrupted: bool
    rows: tuple[DeviceRow, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Watch:
    """How a run is watched and stopped.

    Attributes:
        stopped: asked between steps.
        clock: seconds, monotonic.
    """

    progress: Progress
    stopped: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.perf_counter


class Session:
    """Runs one job on one fleet.

    Args:
        job: what to train.
        transport: the coordinator's, not yet open.
        watch: who looks on.
    """

    def __init__(self, job: Job, transport: Transport, watch: Watch) -> None:
        self._job = job
        self._config = job.config
        self._fleet = Fleet(transport)
        self._watch = watch
        self._outbox = Outbox(transport, lambda _: None)
        self._run = secrets.randbits(32)

    def train(self, out: Path | None) -> Outcome:
        """Plan, deploy, train, evaluate, and write the run folder.

        Raises:
            InputError: the plan cannot be made.
            RunError: the run failed; the folder keeps the last weights that were good.
        """
        wanted = self._config.fleet
        rollout = Rollout(self._job, self._fleet, self._outbox, self._run)
        try:
            self._fleet.open()
            devices = self._fleet.wait(wanted.names, wanted.count, wanted.wait_s)
            supply = rollout.supply(devices)
            total = self._config.train.total_steps(supply.order.steps_per_epoch)
            plan, pipeline = rollout.deploy(devices, supply, total)
            stem = self._config.model.path.stem
            now = datetime.now().astimezone()
            with closing(RunFolder.create(out, stem=stem, now=now)) as folder:
                folder.write_config(self._config)
                folder.write_plan(plan.encode())
                return self._drive(folder, plan, pipeline, total)
        finally:
            rollout.release()
            self._outbox.close()
            self._fleet.close()

    def _drive(
        self, folder: RunFolder, plan: Plan, pipeline: Pipeline, total: int
    ) -> Outcome:
        """The loop itself, and what is written whichever way it ends."""
        watch = self._watch
        recorder = Recorder(folder, watch.progress, watch.clock)
        recorder.begin(plan, total, pipeline.order.steps_per_epoch)
        loop = PipelineLoop(self._fleet, pipeline, recorder, watch.stopped)
        try:
            gate = Gate(loop, _gated(pipeline), total, recorder)
            model = self._train(loop, gate, folder, total)
        finally:
            watch.progress.close()
            rows = tuple(recorder.rows(loop.tally))
            self._write_report(folder, plan, rows)
        steps = loop.tally.committed + 1
        remarks = (*plan.remarks, *self._job.data.remarks, *recorder.remarks)
        return Outcome(
            folder.path, model, steps, recorder.score, steps < total, rows, remarks
        )

    def _train(self, loop: PipelineLoop, gate: Gate, folder: RunFolder, total: int) -> Path:
        """Alternate training and evaluation, keeping the weights at some evaluations.

        A run that fails leaves the last weights kept, and says of which step they are.
        """
        every = self._config.train.eval_every or loop.steps_per_epoch
        kept_step, kept_s = 0, self._watch.clock()
        try:
            while loop.tally.committed + 1 < total and not self._watch.stopped():
                done = loop.tally.committed + 1
                loop.train_until(min(total, (done // every + 1) * every))
                if not self._watch.stopped():
                    self._evaluate(loop, gate)
                if not kept_step or self._watch.clock() - kept_s > KEEP_EVERY_S:
                    self._keep(folder, loop.weights())
                    kept_step, kept_s = loop.tally.committed + 1, self._watch.clock()
            return self._keep(folder, loop.weights())
        except DivergedError as error:
            self._keep(folder, loop.weights(max(loop.first_step - 1, error.step - 2)))
            raise
        except RunError as error:
            if kept_step:
                path = folder.path / MODEL_FILE
                error.add_note(f"{path} holds the weights after step {kept_step}")
            raise

    def _evaluate(self, loop: PipelineLoop, gate: Gate) -> None:
        step = loop.tally.committed + 1
        due = gate.due(step)
        measured = loop.evaluate(each=due)
        if due and measured is not None:
            gate.compare(step, measured)

    def _keep(self, folder: RunFolder, weights: Weights) -> Path:
        return folder.write_model(lambda path: self._job.export(path, weights))

    def _write_report(
        self, folder: RunFolder, plan: Plan, rows: tuple[DeviceRow, ...]
    ) -> None:
        steps, evaluations = read_metrics(folder.path / METRICS_FILE)
        text = plan.encode().decode()
        config = resolved_toml(self._config)
        gates = read_gates(folder.path / METRICS_FILE)
        report = Report(folder.path.name, steps, evaluations, rows, text, config, gates)
        folder.write_report(render(report))


def _gated(pipeline: Pipeline) -> tuple[int, ...]:
    """The stages that keep their deployed weights, to be compared with."""
    return tuple(m.stage for m in pipeline.manifests if gated(m))


def train(
    config: RunConfig, transport: Transport, watch: Watch, out: Path | None
) -> Outcome:
    """Check everything, then run it: see `Session.train`."""
    return Session(prepare(config), transport, watch).train(out)
