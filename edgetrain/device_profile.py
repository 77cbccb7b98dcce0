"""A device's profile: what it was measured to do, as a file and in its presence.

`edgetrain-agent probe` writes it; the planner predicts the time of layers from it.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Final

import msgspec

from edgetrain.errors import ConfigError
from edgetrain.op_groups import Amount

FORMAT: Final = 1
MAX_FILE_BYTES: Final = 1 << 20
MAX_CASES: Final = 256
MAX_TEXT: Final = 128
MAX_SECONDS: Final = 3600.0
MAX_WORK: Final = 1e18
MAX_COUNT: Final = 1 << 20
MAX_MEMORY_BYTES: Final = 1 << 50
MAX_BYTES_PER_S: Final = 1e13
MAX_FACTOR: Final = 1e3


class Case(msgspec.Struct, frozen=True):
    """One measured piece of work, all of one op group.

    Attributes:
        name: such as ``"conv3x3 64"``; with `batch` it names the case.
        group: of `OpGroup`; a reader passes over one that it does not know.
        flop, nbytes, nodes: of the forward; see `Amount`.
        forward_s: of one run, weights being inputs, as in training; of an update.
        backward_s: gradients of weights and of the input; 0 where there are none.
    """

    name: str
    group: str
    batch: int
    flop: float
    nbytes: float
    nodes: float
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        for name in ("name", "group"):
            _check_text(f"a case's {name}", getattr(self, name))
        _check(f"{self.name}: batch", self.batch, 1, MAX_COUNT)
        for name in ("flop", "nbytes", "nodes"):
            _check(f"{self.name}: {name}", getattr(self, name), 0, MAX_WORK)
        _check_seconds(f"{self.name}: forward_s", self.forward_s)
        _check(f"{self.name}: backward_s", self.backward_s, 0, MAX_SECONDS)

    @property
    def amount(self) -> Amount:
        return Amount(self.flop, self.nbytes, self.nodes)


class LinkProfile(msgspec.Struct, frozen=True):
    """A device's way to the broker.

    Attributes:
        latency_s: of one leg, between device and broker: half the round trip of an empty
            message from the device to itself, which takes two legs. A hop from one device
            to another takes one leg of each.
        bytes_per_s: that leave and come back at once, in a stream of large messages to
            itself: the lesser of up and down where the link carries both at a time, half
            of what it carries where it does not.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check("latency_s", self.latency_s, 0, MAX_SECONDS)
        _check_positive("link bytes_per_s", self.bytes_per_s, MAX_BYTES_PER_S)


class DeviceProfile(msgspec.Struct, frozen=True):
    """What was measured of one device.

    Attributes:
        device: its name, or the host's.
        engine: with its version.
        memory_bytes: half of what was free.
        threads, spinning: the engine's settings that the cases were measured with, found
            by search: the fewest threads within a few per cent of the best.
        block: channels in a block of the engine's own layout; 0: it has none.
        run_overhead_s, node_overhead_s: of a forward: fixed, and by node of no size.
        weights_as_inputs: by group, how many times as long a forward takes whose weights
            are inputs than one whose weights are constants.
        link: None where no broker was given.
        date: of the measurement, ISO 8601.
    """

    device: str
    engine: str
    cores: int
    memory_bytes: int
    threads: int
    spinning: bool
    run_overhead_s: float
    node_overhead_s: float
    cases: tuple[Case, ...]
    weights_as_inputs: dict[str, float] = {}
    block: int = 0
    link: LinkProfile | None = None
    date: str = ""
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(
                f"format {self.format}, this edgetrain reads {FORMAT}: probe again with"
                " the edgetrain that reads it"
            )
        _check_text("device", self.device)
        _check_text("engine", self.engine)
        _check_text("date", self.date)
        for name in ("cores", "threads"):
            _check(name, getattr(self, name), 1, MAX_COUNT)
        _check("block", self.block, 0, MAX_COUNT)
        _check("memory_bytes", self.memory_bytes, 1, MAX_MEMORY_BYTES)
        _check_seconds("run_overhead_s", self.run_overhead_s)
        _check("node_overhead_s", self.node_overhead_s, 0, MAX_SECONDS)
        self._check_parts()

    def _check_parts(self) -> None:
        for group, factor in self.weights_as_inputs.items():
            _check_text("weights_as_inputs", group)
            _check_positive(f"weights_as_inputs of {group}", factor, MAX_FACTOR)
        many = max(len(self.cases), len(self.weights_as_inputs))
        if not self.cases or many > MAX_CASES:
            raise ValueError(f"{many} cases: a profile has 1 to {MAX_CASES}")
        named = [(case.name, case.batch) for case in self.cases]
        if len(set(named)) < len(named):
            raise ValueError("two cases have the same name and batch")

    @property
    def fingerprint(self) -> str:
        """Names this very measurement: 16 hexadecimal digits."""
        as_read = msgspec.convert(msgspec.to_builtins(self), DeviceProfile)
        return hashlib.sha256(msgspec.msgpack.encode(as_read)).hexdigest()[:16]

    def slowed(self, speed: float) -> DeviceProfile:
        """Of a device held back to a share of this one's speed, above 0, at most 1."""
        cases = tuple(
            msgspec.structs.replace(
                case,
                forward_s=min(case.forward_s / speed, MAX_SECONDS),
                backward_s=min(case.backward_s / speed, MAX_SECONDS),
            )
            for case in self.cases
        )
        return msgspec.structs.replace(
            self,
            cases=cases,
            run_overhead_s=min(self.run_overhead_s / speed, MAX_SECONDS),
            node_overhead_s=min(self.node_overhead_s / speed, MAX_SECONDS),
        )

    def encode(self) -> bytes:
        """As indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def decode(cls, data: bytes, *, place: str = "profile") -> DeviceProfile:
        """Parse and check a profile.

        Args:
            data: JSON.
            place: where it comes from, for messages.

        Raises:
            ConfigError: it is no profile, or a value is out of range.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{place}: not a device's profile: {error}; write one with"
                " `edgetrain-agent probe --out FILE`"
            ) from error

    @classmethod
    def load(cls, path: Path) -> DeviceProfile:
        """Read a profile's file.

        Raises:
            ConfigError: it cannot be read, is too large or is no profile.
        """
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"{path}: cannot be read ({reason}); check the path"
            ) from error
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path}: over {MAX_FILE_BYTES} B, which no device's profile is; check the"
                " path"
            )
        return cls.decode(data, place=str(path))


def _check(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} is {value:g}: it must be in {low:g} ... {high:g}")


def _check_positive(name: str, value: float, high: float) -> None:
    if not (math.isfinite(value) and 0 < value <= high):
        raise ValueError(f"{name} is {value:g}: it must be above 0, at most {high:g}")


def _check_seconds(name: str, value: float) -> None:
    _check_positive(name, value, MAX_SECONDS)


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_TEXT or not text.isprintable():
        raise ValueError(f"{name} is no text of at most {MAX_TEXT} printable characters")
