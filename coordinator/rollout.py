"""From a job and a fleet to a deployed pipeline: plan, compile, deploy, and move."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec

from coordinator.assignment import Assignment
from coordinator.deploy import Deployment, chunk_bytes_of, deploy, heads_of
from coordinator.deployed import Deployed, Draft, Supply
from coordinator.feed import Ends, Feed
from coordinator.fleet import Fleet
from coordinator.heads import ship
from coordinator.job import Job, Means
from coordinator.optimizer import optimizer_spec
from coordinator.pipeline_loop import Pipeline
from coordinator.planning import Planner
from coordinator.profile_cache import NO_CACHE, ProfileCache
from coordinator.written_plan import written
from edgetrain.errors import DataError, OverfullDeviceError, PlanError, TransportError
from edgetrain.manifest import Manifest
from edgetrain.plan import Plan
from edgetrain.runtime.outbox import Outbox
from edgetrain.samples import BatchOrder
from edgetrain.stage_state import ModelState, split
from edgetrain.wire.hello import DatasetInfo, Hello
from edgetrain.wire.messages import LocalData, Release

log = logging.getLogger(__name__)

DEPLOY_TIMEOUT_S: Final = 120.0
MEMORY_TRIES: Final = 3  # plans that may turn out not to fit


class Rollout:
    """Deploys one job.

    Devices are engaged from the first deployment on, until `release`.

    Args:
        job: what to train.
        fleet: carries the commands.
        outbox: carries bundles and samples.
        run: the number that names the run.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        job: Job,
        fleet: Fleet,
        outbox: Outbox,
        run: int,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._job = job
        self._fleet = fleet
        self._outbox = outbox
        self._run = run
        self._clock = clock
        self._engaged: set[str] = set()
        self._epochs = 0

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

    def planner(
        self, devices: Mapping[str, Hello], supply: Supply, cache: ProfileCache = NO_CACHE
    ) -> Planner:
        """The planner of the run.

        Raises:
            PlanError: the request cannot be kept with these devices.
        """
        job = self._job
        config = job.config
        if not supply.eval_samples:  # nothing to compare a stage on
            estimator = msgspec.structs.replace(config.estimator, gate=False)
            config = msgspec.structs.replace(config, estimator=estimator)
        return Planner(config, job, devices, cache)

    def begin(self, planner: Planner, supply: Supply, total_steps: int) -> Deployed:
        """Deploy a first plan, and a second if the times measured ask for one.

        Raises:
            PlanError: no plan satisfies the request.
            RunError: a device refused or did not answer.
        """
        assignment, deployed = self._first(planner, supply, total_steps)
        better = planner.improve(assignment, deployed.ready)
        if better is not None:
            log.info("the plan changes: measured times differ from the first guess")
            deployed = self.deploy(self.draft(better), supply, total_steps)
        return deployed

    def release(self) -> None:
        """Let every device go that was given a stage, whatever came of it."""
        self._let_go(self._engaged, "the run is over")

    def _let_go(self, devices: Collection[str], reason: str) -> None:
        for device in sorted(devices):
            try:
                self._fleet.command(device, Release(self._run, 0, reason))
            except TransportError as error:
                log.warning("%s not released: %s", device, error)
        self._engaged.difference_update(devices)

    def _first(
        self, planner: Planner, supply: Supply, total_steps: int
    ) -> tuple[Assignment, Deployed]:
        """The first plan that fits the devices, by the memory that its graphs need."""
        assignment = planner.assign()
        tries_left = MEMORY_TRIES
        while True:
            try:
                return assignment, self.deploy(self.draft(assignment), supply, total_steps)
            except OverfullDeviceError as refusal:
                tries_left -= 1
                if not tries_left:
                    raise
                log.info("the plan changes: %s", refusal)
                assignment = _smaller(planner, assignment, refusal)

    def draft(self, assignment: Assignment) -> Draft:
        """Compile a plan; touches nothing else, so it may run beside the training."""
        gradients = assignment.gradients
        means = Means(
            assignment.blocks, gradients.estimators, gradients.returns, assignment.keeps
        )
        bundles = self._job.compile(assignment.cuts, gradients.modes, means)
        bundles, remarks = ship(bundles, self._job.source, self._job.config.train.seed)
        return Draft(assignment, bundles, remarks)

    def deploy(
        self,
        draft: Draft,
        supply: Supply,
        total_steps: int,
        state: ModelState | None = None,
    ) -> Deployed:
        """Put a plan in force, from a state if the run has begun.

        Devices that had a stage and get none are let go.

        Raises:
            DeviceError: one refused, or went away.
            FleetError: one did not report in time.
        """
        train, assignment = self._job.config.train, draft.assignment
        bundles = draft.bundles
        if state is not None:
            bundles = [b.resumed(split(state, b.manifest)) for b in bundles]
        epoch, self._epochs = self._epochs, self._epochs + 1
        deployment = Deployment(
            run=self._run,
            epoch=epoch,
            devices=assignment.devices,
            schedule=assignment.schedule,
            microbatches=assignment.microbatches,
            optimizer=optimizer_spec(train, total_steps),
            seed=train.seed,
            local=supply.local,
            timeout_s=max(DEPLOY_TIMEOUT_S, self._job.config.fleet.step_timeout_s),
            codecs=assignment.codecs,
            target_step_s=self._job.config.plan.target_step_s or 0.0,
            chunk_bytes=self._chunk_bytes,
        )
        start_s = self._clock()
        self._engaged.update(assignment.devices)
        ready = deploy(self._fleet, self._outbox, bundles, deployment)
        self._let_go(self._engaged.difference(assignment.devices), "it has no stage now")
        return Deployed(epoch, draft, ready, self._clock() - start_s)

    def plan(self, planner: Planner, deployed: Deployed) -> Plan:
        """The plan in force, as it is written down."""
        sha256 = self._job.sha256
        plan = written(planner, deployed.assignment, sha256, deployed.ready)
        remarks = (*plan.remarks, *deployed.draft.remarks)
        return msgspec.structs.replace(plan, remarks=remarks)

    def pipeline(self, deployed: Deployed, supply: Supply) -> Pipeline:
        """What the loop drives."""
        return Pipeline(
            run=self._run,
            epoch=deployed.epoch,
            devices=deployed.assignment.devices,
            manifests=_manifests(deployed.draft),
            order=supply.order,
            feed=self._feed(deployed) if supply.local is None else None,
            evaluation_samples=supply.eval_samples,
            timeout_s=self._job.config.fleet.step_timeout_s,
        )

    @property
    def _chunk_bytes(self) -> int:
        limit_bytes = self._fleet.transport.payload_limit_bytes
        return chunk_bytes_of(limit_bytes, self._job.config.fleet.max_packet_bytes)

    def _feed(self, deployed: Deployed) -> Feed:
        data = self._job.data
        if data.train is None:
            raise DataError("[data] train names no file")
        devices = deployed.assignment.devices
        manifests = _manifests(deployed.draft)
        ends = Ends(
            self._run,
            deployed.epoch,
            manifests[0],
            manifests[-1],
            devices[0],
            devices[-1],
            self._chunk_bytes,
            tuple((stage, devices[stage]) for stage in heads_of(manifests)),
        )
        return Feed(self._outbox, ends, data.train, data.eval)


def _smaller(
    planner: Planner, assignment: Assignment, refusal: OverfullDeviceError
) -> Assignment:
    """A plan that heeds what a device found its stage to need.

    Raises:
        OverfullDeviceError: there is none.
    """
    planner.correct_memory(assignment, refusal)
    try:
        return planner.assign()
    except PlanError as error:
        raise refusal from error


def _manifests(draft: Draft) -> tuple[Manifest, ...]:
    return tuple(bundle.manifest for bundle in draft.bundles)


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
