"""Whole runs on agents in this process, watched on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx

from coordinator.job import prepare
from coordinator.progress import SilentProgress
from coordinator.session import Outcome, Session, Watch
from edgetrain.compiler.normalise import normalise
from edgetrain.config import RunConfig
from edgetrain.sim.fleet import SimDevice, ThreadFleet
from edgetrain.transport.memory import MemoryHub, MemoryTransport
from edgetrain.wire.frame import Frame, parse
from edgetrain.wire.topics import COORDINATOR, Channel

THREE = (SimDevice("one"), SimDevice("two"), SimDevice("three"))
MAX_BODY_BYTES = 2 << 20


class Sent(NamedTuple):
    """A message on the wire."""

    source: str
    to: str
    channel: Channel
    payload: bytes

    @property
    def frame(self) -> Frame:
        return parse(self.payload, max_body_bytes=MAX_BODY_BYTES)


@dataclass
class Wire:
    """Every message of a run, as the hub has seen it."""

    messages: list[Sent] = field(default_factory=list)

    def tap(self, source: str, to: str, channel: Channel, payload: bytes) -> None:
        self.messages.append(Sent(source, to, channel, payload))

    def data(self) -> Iterator[Sent]:
        return (sent for sent in self.messages if sent.channel is Channel.DATA)


def train(
    config: RunConfig,
    out: Path,
    devices: Sequence[SimDevice] = THREE,
    *,
    wire: Wire | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run it on agents in threads, over the in-memory hub."""
    hub = MemoryHub(tap=wire.tap if wire else None)
    with ThreadFleet(lambda name: MemoryTransport(hub, name), devices):
        transport = MemoryTransport(hub, COORDINATOR)
        watch = Watch(SilentProgress(), stopped)
        return Session(prepare(config), transport, watch).train(out)


def weights_of(path: Path) -> dict[str, np.ndarray]:
    return dict(normalise(onnx.load(path), batch=1).weights)
