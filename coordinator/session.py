"""One training run: from a run file and a fleet to a trained ONNX file."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from coordinator.deploy import Deployment, deploy
from coordinator.feed import Ends, Feed
from coordinator.figures import DeviceRow
from coordinator.fleet import Fleet
from coordinator.job import Job, optimizer_spec, prepare
from coordinator.pipeline_loop import Pipeline, PipelineLoop, Score, Weights
from coordinator.planning import Assignment, Planner
from coordinator.progress import Progress
from coordinator.recorder import Recorder
from coordinator.report import Report, render
from coordinator.run_folder import METRICS_FILE, RunFolder, read_metrics, resolved_toml
from edgetrain.bundle import Bundle
from edgetrain.config import RunConfig
from edgetrain.errors import DataError, DivergedError, EdgeTrainError, PlanError
from edgetrain.plan import Plan
from edgetrain.runtime.outbox import Outbox
from edgetrain.samples import BatchOrder
from edgetrain.transport.base import Transport
from edgetrain.wire.frame import DEFAULT_CHUNK_BYTES
from edgetrain.wire.messages import DatasetInfo, Hello, LocalData, Ready, Release

log = logging.getLogger(__name__)

DEPLOY_TIMEOUT_S = 120.0


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


@dataclass(slots=True)
class _Deployed:
    """A plan in force."""

    epoch: int
    assignment: Assignment
    bundles: list[Bundle]
    ready: list[Ready] = field(default_factory=list)


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
        config = self._config
        self._fleet.open()
        try:
            fleet = config.fleet
            devices = self._fleet.wait(fleet.names, fleet.count, fleet.wait_s)
            planner = Planner(config, self._job.program, self._job.trainable, devices)
            order, local, eval_samples = self._data(devices)
            total = config.train.total_steps(order.steps_per_epoch)
            deployed = self._deploy(planner, total, local)
            stem = config.model.path.stem
            with RunFolder.create(
                out, stem=stem, now=datetime.now().astimezone()
            ) as folder:
                plan = planner.plan(deployed.assignment, deployed.ready, self._job.sha256)
                folder.write_config(config)
                folder.write_plan(plan.encode())
                feed = self._feed(deployed) if local is None else None
                pipeline = self._pipeline(deployed, order, feed, eval_samples)
                return self._drive(folder, plan, pipeline, total)
        finally:
            self._outbox.close()
            self._fleet.close()

    def _drive(
        self, folder: RunFolder, plan: Plan, pipeline: Pipeline, total: int
    ) -> Outcome:
        """The loop itself, and what is written whichever way it ends."""
        feed = pipeline.feed
        watch = self._watch
        recorder = Recorder(
            folder, watch.progress, watch.clock, lambda: feed.sent_bytes if feed else 0
        )
        recorder.begin(plan, total, pipeline.order.steps_per_epoch)
        loop = PipelineLoop(self._fleet, pipeline, recorder, watch.stopped)
        try:
            model = self._train(loop, folder, pipeline.order.steps_per_epoch, total)
            rows = tuple(recorder.rows(loop.tally))
            self._write_report(folder, plan, rows)
        finally:
            watch.progress.close()
            self._release(pipeline)
        return Outcome(
            folder.path,
            model,
            loop.tally.committed + 1,
            recorder.score,
            loop.tally.committed + 1 < total,
            rows,
            (*self._job.program.remarks, *self._job.data.remarks),
        )

    def _train(
        self, loop: PipelineLoop, folder: RunFolder, steps_per_epoch: int, total: int
    ) -> Path:
        """Alternate training and evaluation; keep the weights at each evaluation."""
        every = self._config.train.eval_every or steps_per_epoch
        try:
            while loop.tally.committed + 1 < total and not self._watch.stopped():
                done = loop.tally.committed + 1
                loop.train_until(min(total, (done // every + 1) * every))
                if not self._watch.stopped():
                    loop.evaluate()
                model = self._keep(folder, loop.weights())
            return model
        except DivergedError as error:
            self._keep(folder, loop.weights(max(-1, error.step - 2)))
            raise

    def _keep(self, folder: RunFolder, weights: Weights) -> Path:
        return folder.write_model(self._job.export(weights))

    def _deploy(self, planner: Planner, total: int, local: LocalData | None) -> _Deployed:
        """Deploy the first plan; deploy a second if measured times ask for one."""
        assignment = planner.assign()
        deployed = self._deploy_once(assignment, 0, total, local)
        better = planner.improve(assignment, deployed.ready)
        if better is not None:
            log.info("a stage is moved: measured times differ from the first guess")
            deployed = self._deploy_once(better, 1, total, local)
        return deployed

    def _deploy_once(
        self, assignment: Assignment, epoch: int, total: int, local: LocalData | None
    ) -> _Deployed:
        train = self._config.train
        bundles = self._job.compile(assignment.cuts, assignment.modes)
        deployment = Deployment(
            run=self._run,
            epoch=epoch,
            devices=assignment.devices,
            schedule=train.schedule,
            microbatches=train.microbatches,
            optimizer=optimizer_spec(train, total),
            seed=train.seed,
            local=local,
            timeout_s=max(DEPLOY_TIMEOUT_S, self._config.fleet.step_timeout_s),
        )
        ready = deploy(self._fleet, self._outbox, bundles, deployment)
        return _Deployed(epoch, assignment, bundles, ready)

    def _data(self, devices: dict[str, Hello]) -> tuple[BatchOrder, LocalData | None, int]:
        """The order of the samples, where they are, and how many there are to evaluate."""
        config, train = self._config, self._config.train
        local = None
        if config.data.device is not None and config.data.dataset is not None:
            info = _dataset(devices, config.data.device, config.data.dataset)
            samples, eval_samples = info.train_samples, info.eval_samples
            local = LocalData(info.name, train.batch_size, train.shuffle, self._job.labels)
        else:
            samples = len(self._job.data.train) if self._job.data.train else 0
            eval_samples = len(self._job.data.eval) if self._job.data.eval else 0
        order = BatchOrder(
            samples, train.batch_size, train.microbatches, train.seed, train.shuffle
        )
        return order, local, eval_samples

    def _feed(self, deployed: _Deployed) -> Feed:
        train = self._job.data.train
        if train is None:
            raise DataError("[data] train names no file")
        devices = deployed.assignment.devices
        ends = Ends(
            self._run,
            deployed.epoch,
            deployed.bundles[0].manifest,
            deployed.bundles[-1].manifest,
            devices[0],
            devices[-1],
            DEFAULT_CHUNK_BYTES,
        )
        return Feed(self._outbox, ends, train, self._job.data.eval)

    def _pipeline(
        self, deployed: _Deployed, order: BatchOrder, feed: Feed | None, eval_samples: int
    ) -> Pipeline:
        return Pipeline(
            run=self._run,
            epoch=deployed.epoch,
            devices=deployed.assignment.devices,
            manifests=tuple(bundle.manifest for bundle in deployed.bundles),
            order=order,
            feed=feed,
            evaluation_samples=eval_samples,
            timeout_s=self._config.fleet.step_timeout_s,
        )

    def _release(self, pipeline: Pipeline) -> None:
        for device in dict.fromkeys(pipeline.devices):
            try:
                self._fleet.command(
                    device, Release(pipeline.run, pipeline.epoch, "the run is over")
                )
            except EdgeTrainError as error:
                log.warning("%s not released: %s", device, error)

    def _write_report(
        self, folder: RunFolder, plan: Plan, rows: tuple[DeviceRow, ...]
    ) -> None:
        steps, evaluations = read_metrics(folder.path / METRICS_FILE)
        text = plan.encode().decode()
        config = resolved_toml(self._config)
        report = Report(folder.path.name, steps, evaluations, rows, text, config)
        folder.write_report(render(report))


def _dataset(devices: dict[str, Hello], device: str, name: str) -> DatasetInfo:
    if device not in devices:
        raise PlanError(f"[data] device = {device!r} is not among {', '.join(devices)}")
    infos = {info.name: info for info in devices[device].datasets}
    if name not in infos:
        known = ", ".join(infos) or "none"
        raise DataError(
            f"[data] dataset = {name!r}: device {device!r} has no such data set; its agent"
            f" file names: {known}"
        )
    return infos[name]


def train(
    config: RunConfig, transport: Transport, watch: Watch, out: Path | None
) -> Outcome:
    """Check everything, then run it: see `Session.train`."""
    return Session(prepare(config), transport, watch).train(out)
