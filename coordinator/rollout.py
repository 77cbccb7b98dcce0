"""From a job and a fleet to a deployed pipeline: plan, compile, deploy, and once again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from coordinator.deploy import Deployment, deploy, heads_of
from coordinator.feed import Ends, Feed
from coordinator.fleet import Fleet
from coordinator.heads import ship
from coordinator.job import Job
from coordinator.optimizer import optimizer_spec
from coordinator.pipeline_loop import Pipeline
from coordinator.planning import Assignment, Planner
from coordinator.pretrained import is_pretrained
from edgetrain.bundle import Bundle
from edgetrain.errors import DataError, PlanError, TransportError
from edgetrain.plan import Plan
from edgetrain.runtime.outbox import Outbox
from edgetrain.samples import BatchOrder
from edgetrain.wire.frame import DEFAULT_CHUNK_BYTES
from edgetrain.wire.hello import DatasetInfo, Hello
from edgetrain.wire.messages import LocalData, Ready, Release

log = logging.getLogger(__name__)

DEPLOY_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Supply:
    """The samples of a run.

    Attributes:
        order: which of them each step takes.
        local: where they are, if not at the coordinator.
        eval_samples: how many there are to evaluate on.
    """

    order: BatchOrder
    local: LocalData | None
    eval_samples: int


@dataclass(frozen=True, slots=True)
class _Deployed:
    epoch: int
    assignment: Assignment
    bundles: list[Bundle]
    ready: list[Ready]
    remarks: tuple[str, ...]


class Rollout:
    """Deploys one job.

    Devices are engaged from the first deployment on, until `release`.

    Args:
        job: what to train.
        fleet: carries the commands.
        outbox: carries bundles and samples.
        run: the number that names the run.
    """

    def __init__(self, job: Job, fleet: Fleet, outbox: Outbox, run: int) -> None:
        self._job = job
        self._fleet = fleet
        self._outbox = outbox
        self._run = run
        self._engaged: set[str] = set()

    def supply(self, devices: Mapping[str, Hello]) -> Supply:
        """Find the run's samples.

        Raises:
            DataError: there are too few, or the device has no such data set.
            PlanError: the device is not there.
        """
        config, train = self._job.config, self._job.config.train
        local = None
        if config.data.device is not None and config.data.dataset is not None:
            info = _dataset(devices, config.data.device, config.data.dataset)
            samples, eval_samples = info.train_samples, info.eval_samples
            local = LocalData(info.name, train.batch_size, train.shuffle, self._job.labels)
        else:
            data = self._job.data
            samples = len(data.train) if data.train else 0
            eval_samples = len(data.eval) if data.eval else 0
        order = BatchOrder(
            samples, train.batch_size, train.microbatch_count, train.seed, train.shuffle
        )
        return Supply(order, local, eval_samples)

    def deploy(
        self, devices: Mapping[str, Hello], supply: Supply, total_steps: int
    ) -> tuple[Plan, Pipeline]:
        """Deploy a first plan, and a second if the times measured ask for one.

        Raises:
            PlanError: no plan satisfies the request.
            RunError: a device refused or did not answer.
        """
        job = self._job
        config = job.config
        if not supply.eval_samples:  # nothing to compare a stage on
            estimator = msgspec.structs.replace(config.estimator, gate=False)
            config = msgspec.structs.replace(config, estimator=estimator)
        planner = Planner(
            config, job.program, job.trainable, devices, lambda: is_pretrained(job)
        )
        assignment = planner.assign()
        deployed = self._deploy(assignment, 0, total_steps, supply.local)
        better = planner.improve(assignment, deployed.ready)
        if better is not None:
            log.info("the plan changes: measured times differ from the first guess")
            deployed = self._deploy(better, 1, total_steps, supply.local)
        plan = planner.plan(deployed.assignment, deployed.ready, job.sha256)
        remarks = (*plan.remarks, *deployed.remarks)
        plan = msgspec.structs.replace(plan, remarks=remarks)
        return plan, self._pipeline(deployed, supply)

    def release(self) -> None:
        """Let every device go that was given a stage, whatever came of it."""
        for device in sorted(self._engaged):
            try:
                self._fleet.command(device, Release(self._run, 0, "the run is over"))
            except TransportError as error:
                log.warning("%s not released: %s", device, error)

    def _deploy(
        self, assignment: Assignment, epoch: int, total_steps: int, local: LocalData | None
    ) -> _Deployed:
        train = self._job.config.train
        gradients = assignment.gradients
        bundles = self._job.compile(
            assignment.cuts,
            gradients.modes,
            assignment.blocks,
            gradients.estimators,
            gradients.returns,
        )
        bundles, remarks = ship(bundles, self._job.source, train.seed)
        deployment = Deployment(
            run=self._run,
            epoch=epoch,
            devices=assignment.devices,
            schedule=train.schedule,
            microbatches=train.microbatch_count,
            optimizer=optimizer_spec(train, total_steps),
            seed=train.seed,
            local=local,
            timeout_s=max(DEPLOY_TIMEOUT_S, self._job.config.fleet.step_timeout_s),
        )
        self._engaged.update(assignment.devices)
        ready = deploy(self._fleet, self._outbox, bundles, deployment)
        return _Deployed(epoch, assignment, bundles, ready, remarks)

    def _pipeline(self, deployed: _Deployed, supply: Supply) -> Pipeline:
        return Pipeline(
            run=self._run,
            epoch=deployed.epoch,
            devices=deployed.assignment.devices,
            manifests=tuple(bundle.manifest for bundle in deployed.bundles),
            order=supply.order,
            feed=self._feed(deployed) if supply.local is None else None,
            evaluation_samples=supply.eval_samples,
            timeout_s=self._job.config.fleet.step_timeout_s,
        )

    def _feed(self, deployed: _Deployed) -> Feed:
        data = self._job.data
        if data.train is None:
            raise DataError("[data] train names no file")
        devices = deployed.assignment.devices
        heads = heads_of([bundle.manifest for bundle in deployed.bundles])
        ends = Ends(
            self._run,
            deployed.epoch,
            deployed.bundles[0].manifest,
            deployed.bundles[-1].manifest,
            devices[0],
            devices[-1],
            DEFAULT_CHUNK_BYTES,
            tuple((stage, devices[stage]) for stage in heads),
        )
        return Feed(self._outbox, ends, data.train, data.eval)


def _dataset(devices: Mapping[str, Hello], device: str, name: str) -> DatasetInfo:
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
