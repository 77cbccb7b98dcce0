"""What the planner is asked: layers, unlike devices, and what a good plan is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from edgetrain.errors import PlanError
from edgetrain.schedules.table import SCHEDULES

MAX_LAYERS: Final = 2000  # tables of a device hold the square of it
MAX_DEVICES: Final = 256
MAX_TABLES: Final = 20_000_000  # layers times layers times devices
MAX_MICROBATCHES: Final = 100_000
PLAIN: Final = "plain"
RECOMPUTE: Final = "recompute"

Objective = Literal["inference", "training"]
Topology = Literal["peer", "broker"]


@dataclass(frozen=True, slots=True)
class Layer:
    """What lies between two neighbouring valid cuts of the model.

    Attributes:
        name: for people; may be empty.
        memory_bytes: what it adds to its stage's memory, whatever is in flight.
        output_bytes: of one microbatch's activations at the cut after it, on the wire.
        stash_bytes: what it adds for each microbatch in flight.
        cotangent_bytes: of one microbatch's cotangents that come back over the cut after
            it; None: as many as `output_bytes`.
        kept_bytes: of those activations in memory; None: as many as `output_bytes`.
    """

    name: str
    memory_bytes: float
    output_bytes: float
    stash_bytes: float = 0.0
    cotangent_bytes: float | None = None
    kept_bytes: float | None = None

    @property
    def received_bytes(self) -> float:
        """What the stage after it holds of a microbatch."""
        return self.output_bytes if self.kept_bytes is None else self.kept_bytes

    def __post_init__(self) -> None:
        back = 0.0 if self.cotangent_bytes is None else self.cotangent_bytes
        kept = self.received_bytes
        sizes = (self.memory_bytes, self.output_bytes, self.stash_bytes, back, kept)
        if not all(0.0 <= size < math.inf for size in sizes):
            raise PlanError(
                f"layer {self.name!r} has sizes {', '.join(map(str, sizes))}: bytes must be"
                " numbers of 0 or more"
            )


@dataclass(frozen=True, slots=True)
class Device:
    """A device as the planner sees it. Those equal but for the name are one type.

    Attributes:
        name: distinct among the devices.
        forward_s, backward_s: of one microbatch, per layer; infinite where the device
            cannot run the layer. For inference `backward_s` is empty.
        memory_bytes: what its stage may use.
        link_bytes_per_s: what it can send and, at the same time, receive; infinite for no
            limit to speak of.
        latency_s: of a message from it to its neighbour (topology "peer"), or either way
            between it and the broker.
    """

    name: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    memory_bytes: float
    link_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        self._require(
            all(t >= 0.0 for t in (*self.forward_s, *self.backward_s)),
            "a time that is not a number of 0 or more",
        )
        self._require(self.memory_bytes >= 0.0, f"memory of {self.memory_bytes} B")
        self._require(self.link_bytes_per_s > 0.0, f"a link of {self.link_bytes_per_s} B/s")
        self._require(0.0 <= self.latency_s < math.inf, f"a latency of {self.latency_s} s")

    def _require(self, condition: bool, fault: str) -> None:
        if not condition:
            raise PlanError(f"device {self.name!r} has {fault}; probe it again")

    @property
    def kind(self) -> tuple[object, ...]:
        """All but the name: equal for devices of one type."""
        return (
            self.forward_s,
            self.backward_s,
            self.memory_bytes,
            self.link_bytes_per_s,
            self.latency_s,
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """One planning task.

    Attributes:
        layers: L of them, in execution order.
        devices: that may take part, in any order.
        objective: "inference" wants the most microbatches a second, "training" the
            shortest step.
        topology: "peer": a stage sends to its neighbour over its own link. "broker": all
            goes up the sender's link and down the receiver's.
        broker_bytes_per_s: what the broker passes on in all, with topology "broker".
        microbatches: M of a training step.
        schedule: one of `SCHEDULES`; it sets how many microbatches a stage stashes.
        samples: in one microbatch.
        pin_first, pin_last: names of the devices that must run the first and the last
            stage. The same name twice: that device runs both ends of the pipeline, two
            stages, and at least one other device what lies between; or all of it alone.
        stages: how many to make; None: as many as is best.
        options: how a stage may be run, of `PLAIN` and `RECOMPUTE`; in each stage the
            fastest that fits.
        hop_overhead_s: that a message takes of its sender's link besides its bytes.
        input_bytes: of one microbatch of the model's inputs, which a first stage that
            recomputes must keep.
    """

    layers: tuple[Layer, ...]
    devices: tuple[Device, ...]
    objective: Objective = "training"
    topology: Topology = "peer"
    broker_bytes_per_s: float = math.inf
    microbatches: int = 1
    schedule: str = "1f1b"
    samples: int = 1
    pin_first: str | None = None
    pin_last: str | None = None
    stages: int | None = None
    options: tuple[str, ...] = (PLAIN,)
    hop_overhead_s: float = 0.0
    input_bytes: float = 0.0

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_words()
        self._check_devices()
        self._check_pins()

    @property
    def training(self) -> bool:
        return self.objective == "training"

    @property
    def broker_limited(self) -> bool:
        return self.topology == "broker" and self.broker_bytes_per_s < math.inf

    def peak(self, to_end: int) -> int:
        """Microbatches stashed at once by the stage `to_end` stages from the end.

        The last stage is 1 from the end. Every schedule's peak depends on nothing else
        but M, which lets the search work backwards.
        """
        if not self.training:
            return 0
        return SCHEDULES[self.schedule].stash_peak(0, to_end, self.microbatches)

    def _check_sizes(self) -> None:
        _require_count("layers", len(self.layers), MAX_LAYERS)
        _require_count("devices", len(self.devices), MAX_DEVICES)
        _require(
            len(self.layers) ** 2 * len(self.devices) <= MAX_TABLES,
            f"{len(self.layers)} layers on {len(self.devices)} devices: planning for so"
            " many of both takes too long; name fewer devices, or fewer cuts",
        )
        _require_count("microbatches", self.microbatches, MAX_MICROBATCHES)
        _require(self.samples >= 1, f"{self.samples} samples a microbatch: at least 1")
        _require(
            self.broker_bytes_per_s > 0.0,
            f"the broker passes on {self.broker_bytes_per_s} B/s: it must be above 0",
        )
        for what, value in (
            ("hop_overhead_s", self.hop_overhead_s),
            ("input_bytes", self.input_bytes),
        ):
            _require(0.0 <= value < math.inf, f"{what} = {value}: 0 or more is needed")

    def _check_words(self) -> None:
        _require_word("objective", self.objective, ("inference", "training"))
        _require_word("topology", self.topology, ("peer", "broker"))
        updating = [name for name, schedule in SCHEDULES.items() if schedule.updates]
        _require_word("schedule", self.schedule, updating)
        _require(bool(self.options), "a stage needs at least one option to run by")
        for option in self.options:
            _require_word("option", option, (PLAIN, RECOMPUTE))

    def _check_devices(self) -> None:
        names = [device.name for device in self.devices]
        twice = sorted({name for name in names if names.count(name) > 1})
        _require(not twice, f"device {', '.join(twice)} is there twice: names must differ")
        count = len(self.layers)
        for device in self.devices:
            given = len(device.forward_s)
            _require(
                given == count,
                f"device {device.name!r} has {given} forward times for {count} layers",
            )
            given = len(device.backward_s)
            _require(
                given == (count if self.training else 0)
                or (not self.training and given == count),
                f"device {device.name!r} has {given} backward times for {count} layers",
            )

    def _check_pins(self) -> None:
        names = {device.name for device in self.devices}
        for pin in (self.pin_first, self.pin_last):
            _require(
                pin is None or pin in names,
                f"pinned device {pin!r} is not among {', '.join(sorted(names))}",
            )
        both_ends = self.pin_first is not None and self.pin_first == self.pin_last
        most = min(len(names) + both_ends, len(self.layers))
        if self.stages is not None:
            _require(
                1 <= self.stages <= most,
                f"{self.stages} stages of {len(self.layers)} layers on {len(names)}"
                f" devices: 1 to {most} are possible",
            )
            _require(
                not (both_ends and self.stages == 2),
                f"device {self.pin_first!r} is pinned to both ends, so that 2 stages would"
                " put all on it in two parts: ask for 1 stage, or for 3 or more",
            )
        if self.pin_first and self.pin_last and not both_ends:
            _require(
                self.stages != 1 and len(self.layers) > 1,
                f"devices {self.pin_first!r} and {self.pin_last!r} are pinned to the first"
                " and the last stage, which takes at least 2 stages",
            )


def ranges_text(layers: range) -> str:
    """A stage's layers as people read them: ``layers 3 to 7``."""
    return f"layers {layers.start} to {layers.stop - 1}"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)


def _require_count(what: str, count: int, most: int) -> None:
    _require(1 <= count <= most, f"{count} {what}: 1 to {most} can be planned for")


def _require_word(what: str, word: str, allowed: Sequence[str] | Iterable[str]) -> None:
    allowed = tuple(allowed)
    _require(word in allowed, f"{what} {word!r} is not one of {', '.join(allowed)}")
