"""What a timeline is made of: stages with times and bytes, devices, and the network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from edgetrain.errors import PlanError
from edgetrain.schedules.table import SCHEDULES
from edgetrain.wire.frame import DEFAULT_CHUNK_BYTES

Topology = Literal["peer", "broker"]
DataOn = Literal["coordinator", "first"]
# (at_s, value): what holds from that moment on
Changes = tuple[tuple[float, float], ...]

LAG: Final = 2  # steps under way beyond the last committed one, as in a real run
MAX_STAGES: Final = 1000
MAX_MICROBATCHES: Final = 100_000
MAX_LOSS: Final = 0.9  # beyond it a connection does not hold


@dataclass(frozen=True, slots=True)
class TimedStage:
    """One stage on its device; times and bytes are of one microbatch unless said otherwise.

    A last stage whose one graph computes the loss and goes backward, as a run's does, has
    `forward_s` 0 and both in `backward_s`.

    Attributes:
        device: its name; a device may run several stages.
        update_s: of the optimizer, once a step.
        output_bytes: of the activations it sends downstream.
        cotangent_bytes: that it sends upstream.
        stash_bytes: kept from forward to backward.
        memory_bytes: held whatever is in flight.
        encode_s, decode_s: to pack a message it sends and unpack one it receives.
    """

    device: str
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    output_bytes: float = 0.0
    cotangent_bytes: float = 0.0
    stash_bytes: float = 0.0
    memory_bytes: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def check(self, place: str) -> None:
        """Refuse what is not a number of 0 or more.

        Raises:
            PlanError: naming `place`, the field and the value.
        """
        for key in (f for f in self.__dataclass_fields__ if f != "device"):
            _require_size(place, key, getattr(self, key))


@dataclass(frozen=True, slots=True)
class TimedDevice:
    """A device's processor and its link, which may change with time.

    Attributes:
        name: distinct among the devices.
        uplink_bytes_per_s, downlink_bytes_per_s: at the start; infinite for no limit.
        latency_s: of a message's way out, and with a broker also of the way in.
        jitter_s: the most that is added to it, drawn evenly for each chunk.
        loss: share of chunks that need a retransmission, 0 to 0.9. They come late, and
            what is behind them waits: TCP is beneath, so nothing disappears.
        speeds: what the stages' times are divided by from then on; before, 1.
        link_rates: bytes/s of both directions from then on; 0 in an outage.
    """

    name: str
    uplink_bytes_per_s: float = math.inf
    downlink_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    speeds: Changes = ()
    link_rates: Changes = ()

    def check(self) -> None:
        """Refuse values out of range.

        Raises:
            PlanError: naming the device, the field, the value and what is allowed.
        """
        place = f"device {self.name!r}"
        _require_rate(place, "uplink_bytes_per_s", self.uplink_bytes_per_s)
        _require_rate(place, "downlink_bytes_per_s", self.downlink_bytes_per_s)
        _require_size(place, "latency_s", self.latency_s)
        _require_size(place, "jitter_s", self.jitter_s)
        _require(
            0.0 <= self.loss <= MAX_LOSS,
            f"{place} has loss = {self.loss}: must be in 0 ... {MAX_LOSS}",
        )
        _check_changes(place, "speeds", self.speeds)
        _check_changes(place, "link_rates", self.link_rates)


@dataclass(frozen=True, slots=True)
class Network:
    """What carries messages between devices.

    Attributes:
        topology: "peer": over the sender's uplink, its latency, and the receiver's
            downlink, which cuts through. "broker": up the sender's link and down the
            receiver's, each with its latency; a chunk is passed on when it is complete.
        broker_bytes_per_s: that the broker passes on in all.
        chunk_bytes: of the frames that a message is cut into, evenly, at the most.
        hop_s, hop_s_per_byte: what a message takes beside links and latencies: building,
            publishing, the broker, and handing over to the worker.
        op_s: what a forward or backward takes beside computing.
    """

    topology: Topology = "broker"
    broker_bytes_per_s: float = math.inf
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    hop_s: float = 0.0
    hop_s_per_byte: float = 0.0
    op_s: float = 0.0

    def check(self) -> None:
        """Refuse values out of range.

        Raises:
            PlanError: naming the field, the value and what is allowed.
        """
        _require(
            self.topology in ("peer", "broker"),
            f"topology {self.topology!r}: must be one of peer, broker",
        )
        _require_rate("the network", "broker_bytes_per_s", self.broker_bytes_per_s)
        _require(
            self.chunk_bytes >= 1,
            f"chunk_bytes = {self.chunk_bytes}: must be 1 or more",
        )
        for key in ("hop_s", "hop_s_per_byte", "op_s"):
            _require_size("the network", key, getattr(self, key))


# Overheads measured on loopback, between processes of one machine of two cores.
NETWORKS: Final[Mapping[str, Network]] = {
    "mosquitto": Network("broker", hop_s=0.55e-3, hop_s_per_byte=2.8e-9, op_s=0.25e-3),
    "iotcore": Network("broker", hop_s=1.2e-3, hop_s_per_byte=2.1e-9, op_s=0.4e-3),
    "tcp": Network("peer", hop_s=0.29e-3, hop_s_per_byte=0.13e-9, op_s=0.15e-3),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A plan under a schedule, on devices and a network: one thing to simulate.

    Attributes:
        stages: in pipeline order.
        devices: all that the stages name; others are idle.
        schedule: one of `SCHEDULES`.
        microbatches: of a step.
        data_on: "coordinator": it sends inputs and labels, step by step. "first": the
            first stage's device has them and sends the labels.
        input_bytes, label_bytes: of one microbatch.
        coordinator: its link; its name is not a device's.
        ahead: steps that may be under way beyond the last committed one.
        seed: of jitter and loss.
    """

    stages: tuple[TimedStage, ...]
    devices: tuple[TimedDevice, ...]
    schedule: str
    microbatches: int
    network: Network = field(default_factory=Network)
    data_on: DataOn = "coordinator"
    input_bytes: float = 0.0
    label_bytes: float = 0.0
    coordinator: TimedDevice = field(default_factory=lambda: TimedDevice("coordinator"))
    ahead: int = LAG
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_counts()
        self.network.check()
        names = [device.name for device in self.devices]
        twice = sorted({name for name in names if names.count(name) > 1})
        _require(not twice, f"device {', '.join(twice)} is there twice: names must differ")
        _require(
            self.coordinator.name not in names,
            f"a device is named {self.coordinator.name!r}, as the coordinator is",
        )
        for device in (*self.devices, self.coordinator):
            device.check()
        for index, stage in enumerate(self.stages):
            stage.check(f"stage {index}")
            _require(
                stage.device in names,
                f"stage {index} is on device {stage.device!r}, which is not among"
                f" {', '.join(names)}",
            )

    def _check_counts(self) -> None:
        for what, count, most in (
            ("stages", len(self.stages), MAX_STAGES),
            ("microbatches", self.microbatches, MAX_MICROBATCHES),
        ):
            _require(1 <= count <= most, f"{count} {what}: 1 to {most} can be simulated")
        _require(
            self.schedule in SCHEDULES,
            f"schedule {self.schedule!r} is not one of {', '.join(SCHEDULES)}",
        )
        _require(
            self.data_on in ("coordinator", "first"),
            f"data_on = {self.data_on!r}: must be one of coordinator, first",
        )
        _require(self.ahead >= 1, f"ahead = {self.ahead}: must be 1 or more")
        _require(self.seed >= 0, f"seed = {self.seed}: must be 0 or more")
        _require_size("the case", "input_bytes", self.input_bytes)
        _require_size("the case", "label_bytes", self.label_bytes)


def _check_changes(place: str, key: str, changes: Changes) -> None:
    for at_s, value in changes:
        _require_size(place, f"{key}, at_s", at_s)
        _require(value >= 0.0, f"{place} has {key} of {value}: must be 0 or more")
    moments = [at_s for at_s, _ in changes]
    _require(
        all(a < b for a, b in itertools.pairwise(moments)),
        f"{place} has {key} at {moments}: times must rise",
    )
    _require(
        not changes or changes[-1][1] > 0.0,
        f"{place} has {key} that end with 0, so nothing would ever go on: add an entry with"
        " what holds afterwards",
    )


def _require_size(place: str, key: str, value: float) -> None:
    _require(
        0.0 <= value < math.inf, f"{place} has {key} = {value}: must be a number from 0 on"
    )


def _require_rate(place: str, key: str, value: float) -> None:
    _require(value > 0.0, f"{place} has {key} = {value}: must be above 0")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)
