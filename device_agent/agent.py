"""The agent: takes stages over, runs a worker for each, and stays up whatever arrives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final, NamedTuple

from device_agent.data import Dataset, LocalSource
from edgetrain.bundle import Bundle, sha256
from edgetrain.errors import (
    BundleError,
    EdgeTrainError,
    OverfullError,
    TransportError,
    WireError,
)
from edgetrain.runtime.activation import measured
from edgetrain.runtime.activation_forecast import activation_bytes_in_run
from edgetrain.runtime.choice import choose
from edgetrain.runtime.complete import check_complete
from edgetrain.runtime.engines.base import Engine
from edgetrain.runtime.inbox import Inbox
from edgetrain.runtime.memory_forecast import required_bytes
from edgetrain.runtime.outbox import Outbox
from edgetrain.runtime.packing import residual_bytes
from edgetrain.runtime.stage import Stage
from edgetrain.runtime.stage_worker import StageWorker
from edgetrain.runtime.surroundings import BatchSource, Surroundings
from edgetrain.samples import BatchOrder
from edgetrain.schedules.table import SCHEDULES
from edgetrain.transport.base import Inbound, Transport
from edgetrain.wire.frame import Address, Kind
from edgetrain.wire.hello import Hello
from edgetrain.wire.messages import (
    Command,
    Deploy,
    Failed,
    Ready,
    Refused,
    Release,
    Report,
    decode_command,
    encode,
)
from edgetrain.wire.reassembly import Message
from edgetrain.wire.topics import COORDINATOR, Channel

log = logging.getLogger(__name__)

BUNDLES_KEPT: Final = 4


class StageKey(NamedTuple):
    """Names one stage of one run's plan."""

    run: int
    epoch: int
    stage: int


@dataclass(frozen=True, slots=True)
class Equipment:
    """What an agent works with; `open_command` takes off and checks a signature."""

    hello: Hello
    engine: Engine
    datasets: Mapping[str, Dataset] = field(default_factory=dict)
    open_command: Callable[[bytes], bytes] = bytes


class Agent:
    """Runs on one device until told to stop.

    Messages come in on the transport's threads, which only sort them: tensors and most
    commands go to the worker of their stage, what builds or ends a worker to `run`.
    """

    def __init__(self, transport: Transport, equipment: Equipment) -> None:
        self._transport = transport
        self._equipment = equipment
        self._inbox = Inbox(self._admits)
        self._outbox: Outbox | None = None
        self._todo: SimpleQueue[Deploy | Release | Message | None] = SimpleQueue()
        self._workers: dict[StageKey, StageWorker] = {}
        self._threads: dict[StageKey, threading.Thread] = {}
        self._bundles: dict[StageKey, bytes] = {}
        self._waiting: dict[StageKey, Deploy] = {}

    def run(self) -> None:
        """Serve until `stop` is called.

        Raises:
            TransportError: the broker cannot be reached or refuses us.
        """
        hello = self._equipment.hello
        self._outbox = Outbox(self._transport, self._inbox, self._sort, self._undelivered)
        self._transport.open(self._receive, announce=encode(hello))
        log.info("%s: ready, engine %s", hello.device, hello.engine)
        try:
            while (item := self._todo.get()) is not None:
                self._handle(item)
        finally:
            for key in list(self._workers):
                self._end(key, "the agent stops")
            self._outbox.close()
            self._transport.close()

    def stop(self) -> None:
        """Make `run` return; from any thread or a signal handler."""
        self._todo.put(None)

    def _receive(self, inbound: Inbound) -> None:
        try:
            if inbound.channel is Channel.CONTROL:
                data = self._equipment.open_command(inbound.payload)
                self._command(inbound.source, decode_command(data))
            else:
                message = self._inbox.receive(inbound)
                if message is not None:
                    self._sort(message)
        except WireError as error:
            log.warning("message from %s dropped: %s", inbound.source, error)

    def _admits(self, source: str, address: Address) -> bool:
        if address.kind is Kind.BUNDLE:
            return source == COORDINATOR
        plan = (address.run, address.epoch)
        return any(key[:2] == plan for key in tuple(self._workers))

    def _undelivered(self, peer: str, run: int, epoch: int, reason: str) -> None:
        reason = f"the connection with {peer!r} has failed: {reason}"
        for key in tuple(self._workers):
            if (key.run, key.epoch) == (run, epoch):
                self._report(Failed(*key, step=0, reason=reason, diverged=False))

    def _command(self, source: str, command: Command) -> None:
        if source != COORDINATOR:
            raise WireError("only the coordinator gives commands")
        if isinstance(command, Deploy | Release):
            self._todo.put(command)
            return
        for key, worker in tuple(self._workers.items()):
            if (key.run, key.epoch) == (command.run, command.epoch):
                worker.give(command)

    def _sort(self, message: Message) -> None:
        address = message.address
        if address.kind is Kind.BUNDLE:
            self._todo.put(message)
            return
        worker = self._workers.get(StageKey(address.run, address.epoch, address.stage))
        if worker is None:
            message.taken()
            log.warning("tensor dropped: no such stage here: %s", address)
        else:
            worker.give(message)

    def _handle(self, item: Deploy | Release | Message) -> None:
        match item:
            case Deploy():
                key = StageKey(item.run, item.epoch, item.stage)
                self._waiting = {key: item, **self._waiting_for(item.run)}
            case Message():
                item.taken()
                address = item.address
                key = StageKey(address.run, address.epoch, address.stage)
                self._bundles[key] = bytes(item.body)
                while len(self._bundles) > BUNDLES_KEPT:
                    del self._bundles[next(iter(self._bundles))]
            case Release():
                for key in [k for k in self._workers if k.run == item.run]:
                    self._end(key, item.reason)
                if self._outbox is not None:
                    self._outbox.forget(item.run)
                return
        if key in self._waiting and key in self._bundles:
            self._take_over(self._waiting.pop(key), self._bundles.pop(key), key)

    def _waiting_for(self, run: int) -> dict[StageKey, Deploy]:
        """Deployments of the run that still wait for their bundle; others are stale."""
        return {key: deploy for key, deploy in self._waiting.items() if key.run == run}

    def _take_over(self, deploy: Deploy, data: bytes, key: StageKey) -> None:
        """Load a stage and report, whichever way it goes."""
        for other in [k for k in self._workers if k[:2] != key[:2] or k == key]:
            self._end(other, "another plan takes its place")
        try:
            ready = self._load(deploy, data, key)
        except EdgeTrainError as error:
            log.warning("stage %d refused: %s", deploy.stage, error)
            ids = (deploy.run, deploy.epoch, deploy.stage)
            needed_bytes = error.needed_bytes if isinstance(error, OverfullError) else 0
            self._report(Refused(*ids, str(error), needed_bytes))
        else:
            self._report(ready)

    def _load(self, deploy: Deploy, data: bytes, key: StageKey) -> Ready:
        if len(data) != deploy.bundle_bytes or sha256(data) != deploy.bundle_sha256:
            raise BundleError(
                f"the bundle of stage {deploy.stage} does not match its hash: it was"
                " damaged or altered on the way"
            )
        bundle = Bundle.decode(data)
        manifest = bundle.manifest
        check_complete(manifest)
        if manifest.stage != deploy.stage or deploy.schedule not in SCHEDULES:
            raise BundleError(
                f"a bundle of stage {manifest.stage} with schedule {deploy.schedule!r} was"
                f" sent for stage {deploy.stage}: the coordinator's version differs from"
                " this agent's"
            )
        schedule = SCHEDULES[deploy.schedule]
        peak = schedule.stash_peak(deploy.stage, manifest.stages, deploy.microbatches)
        needed = required_bytes(manifest, deploy.optimizer, peak)
        needed += residual_bytes(manifest, deploy.codecs)
        self._check_memory(needed)

        def make(version: Bundle) -> Stage:
            return Stage(
                version,
                self._equipment.engine,
                deploy.optimizer,
                microbatches=deploy.microbatches,
                seed=deploy.seed,
            )

        activations = activation_bytes_in_run(manifest, peak)
        bundle = measured(bundle, self._equipment.engine)
        stage, timing = choose(bundle, self._equipment.hello.block, make)
        self._start(deploy, stage, key)
        ids = (deploy.run, deploy.epoch, deploy.stage)
        return Ready(*ids, timing.forward_s, timing.backward_s, needed, activations)

    def _check_memory(self, needed_bytes: int) -> None:
        limit_bytes = self._equipment.hello.memory_bytes
        if needed_bytes > limit_bytes:
            reason = (
                f"the stage needs {needed_bytes / 1e6:.3g} MB, this device lends"
                f" {limit_bytes / 1e6:.3g} MB: use more microbatches, more stages, a"
                " schedule with a smaller stash (1f1b), or raise the agent's memory setting"
            )
            raise OverfullError(reason, needed_bytes)

    def _start(self, deploy: Deploy, stage: Stage, key: StageKey) -> None:
        if self._outbox is None:
            raise EdgeTrainError("the agent is not running")
        source = self._source(deploy, stage)
        world = Surroundings(self._outbox, self._report, time.perf_counter, source)
        worker = StageWorker(deploy, stage, world)
        name = f"{self._transport.name}.stage{deploy.stage}"
        thread = threading.Thread(
            target=self._work, args=(worker, key), name=name, daemon=True
        )
        self._workers[key] = worker
        self._threads[key] = thread
        thread.start()

    def _work(self, worker: StageWorker, key: StageKey) -> None:
        """Run a worker; what it did not foresee must reach the coordinator too."""
        try:
            worker.run()
        except Exception as error:
            log.exception("stage %d: a defect in the agent", key.stage)
            reason = f"a defect in the agent, please report it: {error!r}"
            self._report(Failed(*key, step=0, reason=reason, diverged=False))
            raise

    def _source(self, deploy: Deploy, stage: Stage) -> BatchSource | None:
        local = deploy.local
        if local is None or deploy.stage > 0:
            return None
        dataset = self._equipment.datasets.get(local.dataset)
        if dataset is None:
            known = ", ".join(self._equipment.datasets) or "none"
            raise EdgeTrainError(f"no data set {local.dataset!r} here; there are: {known}")
        batches = BatchOrder(
            len(dataset.train),
            local.batch_size,
            deploy.microbatches,
            deploy.seed,
            local.shuffle,
        )
        return LocalSource(dataset, local, stage.manifest, batches)

    def _end(self, key: StageKey, reason: str) -> None:
        self._workers.pop(key).give(Release(key.run, key.epoch, reason))
        self._threads.pop(key).join(timeout=10.0)

    def _report(self, report: Report) -> None:
        """Tell the coordinator; a connection that is gone tells it enough."""
        try:
            self._transport.send(COORDINATOR, Channel.CONTROL, encode(report))
        except TransportError as error:
            log.warning("not reported to the coordinator: %s", error)
