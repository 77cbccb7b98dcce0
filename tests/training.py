"""Whole runs on agents in this process, watched on the wire."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import onnx

from coordinator.figures import Snapshot
from coordinator.job import prepare
from coordinator.metrics import METRICS_FILE
from coordinator.progress import SilentProgress
from coordinator.run_folder import MODEL_FILE
from coordinator.session import Outcome, Session
from coordinator.watch import Watch
from edgetrain.compiler.normalise import normalise
from edgetrain.config import FleetConfig, RunConfig
from edgetrain.plan_config import PinConfig, PlanConfig
from edgetrain.sim.fleet import SimDevice, ThreadFleet
from edgetrain.transport.memory import MemoryHub, MemoryTransport
from edgetrain.wire.frame import Frame, Kind, parse
from edgetrain.wire.topics import COORDINATOR, Channel

NAMES = ("one", "two", "three")
IN_ORDER = PinConfig(first="one", last="three")
_MAX_BODY_BYTES = 2 << 20


class Sent(NamedTuple):
    """A message on the wire."""

    source: str
    to: str
    channel: Channel
    payload: bytes

    @property
    def frame(self) -> Frame:
        return parse(self.payload, max_body_bytes=_MAX_BODY_BYTES)


@dataclass
class Wire:
    """Every message of a run."""

    messages: list[Sent] = field(default_factory=list)

    def tap(self, source: str, to: str, channel: Channel, payload: bytes) -> None:
        self.messages.append(Sent(source, to, channel, payload))

    def data(self) -> Iterator[Sent]:
        """The frames, without those a busy machine had sent again."""
        seen = set()
        for sent in self.messages:
            if sent.channel is Channel.DATA:
                ticket = sent.frame.ticket
                mark = (ticket.origin, ticket.sequence)
                if mark not in seen:
                    seen.add(mark)
                    yield sent

    def step_bytes(self, step: int) -> int:
        """Payload bytes of the tensors of one training step."""
        kinds = (Kind.ACTIVATION, Kind.COTANGENT, Kind.LABELS)
        total = 0
        for sent in self.data():
            address = sent.frame.address
            if address.kind in kinds and address.step == step and not address.evaluation:
                total += len(sent.payload)
        return total


class OnStep(SilentProgress):
    """Calls back after each step with how many are done, on the coordinator's thread."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act

    def update(self, snapshot: Snapshot) -> None:
        self._act(snapshot.step)


def three(gradient: Sequence[str] = ("auto",) * 3) -> list[SimDevice]:
    return [SimDevice(n, gradient=g) for n, g in zip(NAMES, gradient, strict=True)]


def on_three(config: RunConfig, cuts: tuple[str, ...]) -> RunConfig:
    """The run with its stages on devices one, two and three, in that order."""
    return msgspec.structs.replace(
        config, plan=PlanConfig(cuts=cuts, pin=IN_ORDER), fleet=FleetConfig(devices=NAMES)
    )


def train(
    config: RunConfig,
    out: Path,
    devices: Iterable[SimDevice] | None = None,
    *,
    wire: Wire | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Run it on agents in threads, over the in-memory hub."""
    hub = MemoryHub(tap=wire.tap if wire else None)
    fleet = ThreadFleet(lambda name: MemoryTransport(hub, name), tuple(devices or three()))
    with fleet:
        coordinator = MemoryTransport(hub, COORDINATOR)
        session = Session(prepare(config), coordinator, watch or Watch(SilentProgress()))
        return session.train(out)


def keeping_all(progress: SilentProgress, stopped: Callable[[], bool]) -> Watch:
    """A watch whose clock leaps, so that the weights are kept after every evaluation."""
    ticks = itertools.count()
    return Watch(progress, stopped, clock=lambda: 10.0 * next(ticks))


def weights_of(model: Path) -> dict[str, np.ndarray]:
    return dict(normalise(onnx.load(model), batch=1).weights)


def same_weights(folder: Path, other: Path) -> bool:
    """Whether two runs' trained models have them equal bit for bit."""
    a, b = (weights_of(run / MODEL_FILE) for run in (folder, other))
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / METRICS_FILE).read_bytes().splitlines()
    return [msgspec.json.decode(line) for line in lines]
