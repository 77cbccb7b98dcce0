"""One stage worker on a thread, over the in-memory hub, with a clock that counts."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Mapping
from typing import Self

import numpy as np

from edgetrain.bundle import Bundle
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.inbox import Inbox
from edgetrain.runtime.outbox import Outbox
from edgetrain.runtime.stage import Stage
from edgetrain.runtime.stage_worker import StageWorker
from edgetrain.runtime.surroundings import BatchSource, Surroundings
from edgetrain.transport.base import Inbound
from edgetrain.transport.memory import MemoryHub, MemoryTransport
from edgetrain.wire.frame import Address, Kind
from edgetrain.wire.messages import Deploy, Release, Report, Route
from edgetrain.wire.reassembly import Message
from edgetrain.wire.topics import COORDINATOR, Channel
from tests.stage_runs import ENGINE

WAIT_S = 20.0  # only a failing test waits this long
RUN, EPOCH = 7, 2
NAMES = ("first", "middle", "last")
SGD = OptimizerSpec("sgd", LRSpec(0.5))


class Bench:
    """A worker for one of three stages; its neighbours' mail is collected, unread.

    Attributes:
        reports: what the worker has told the coordinator.
        mail: whole messages for other stages and the coordinator, by receiver.
        frame_bytes: of all frames sent so far.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        microbatches: int = 1,
        optimizer: OptimizerSpec = SGD,
        source: BatchSource | None = None,
    ) -> None:
        manifest = bundle.manifest
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.frame_bytes = 0
        self.number = manifest.stage
        self.stage = Stage(bundle, ENGINE, optimizer, microbatches=microbatches, seed=0)
        names = NAMES[: manifest.stages]
        hub = MemoryHub()
        self._transports = {n: MemoryTransport(hub, n) for n in (*names, COORDINATOR)}
        self.mail: dict[str, queue.SimpleQueue[Message]]
        self.mail = {name: queue.SimpleQueue() for name in self._transports}
        self._readers = {name: Inbox(lambda *_: True) for name in self._transports}
        own = names[self.number]
        self._others = [
            Outbox(transport, self._readers[name], self.mail[name].put, self._undelivered)
            for name, transport in self._transports.items()
            if name != own
        ]
        self.outbox = Outbox(
            self._transports[own],
            self._readers[own],
            lambda message: self.worker.give(message),
            self._undelivered,
        )
        deploy = Deploy(
            RUN, EPOCH, self.number, Route(names), "", 0, "1f1b", microbatches, optimizer,
            0, 64,
        )  # fmt: skip
        clock = itertools.count().__next__
        world = Surroundings(self.outbox, self.reports.put, lambda: float(clock()), source)
        self.worker = StageWorker(deploy, self.stage, world)
        self.thread = threading.Thread(target=self.worker.run, daemon=True)

    def __enter__(self) -> Self:
        for name, transport in self._transports.items():
            transport.open(lambda inbound, name=name: self._receive(name, inbound))
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.give(Release(RUN, EPOCH, "the test is over"))
        self.thread.join(WAIT_S)
        for outbox in (self.outbox, *self._others):
            outbox.close()
        for transport in self._transports.values():
            transport.close()
        assert not self.thread.is_alive()

    def report(self) -> Report:
        return self.reports.get(timeout=WAIT_S)

    def letter(self, to: str) -> Message:
        """The next message for that party."""
        return self.mail[to].get(timeout=WAIT_S)

    def send(
        self, kind: Kind, tensors: Mapping[str, np.ndarray], *place: int, **more: bool
    ) -> None:
        """All tensors of one slot, in the manifest's order.

        Args:
            kind: of the tensors.
            tensors: by name.
            place: step and microbatch, 0 where left out.
            more: `evaluation`.
        """
        for index, array in enumerate(tensors.values()):
            step, microbatch = (*place, 0, 0)[:2]
            at = (RUN, EPOCH, self.number, step, microbatch, index)
            self.worker.give(letter(Address(kind, *at, **more), array))

    def _undelivered(self, *what: object) -> None:
        raise AssertionError(what)

    def _receive(self, name: str, inbound: Inbound) -> None:
        if inbound.channel is Channel.DATA:
            self.frame_bytes += len(inbound.payload)
        message = self._readers[name].receive(inbound)
        if message is not None:
            message.taken()
            self.mail[name].put(message)


def letter(address: Address, array: np.ndarray) -> Message:
    return Message(address, array.dtype.name, memoryview(array.tobytes()))
