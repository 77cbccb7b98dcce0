"""The figures a run shows, and how they are written for people."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_PREFIXES: Final = ("", "k", "M", "G", "T")


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """A device while it trains; `busy` is the share of the time it computed, 0 ... 1."""

    name: str
    busy: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        step: steps done, of `steps`.
        epoch: from 0.
        loss: of the last step.
        accuracy: of the last evaluation, None before it or where there is none.
        samples_per_s, bytes_per_s: over the last few steps; bytes of all devices.
        devices: in pipeline order.
    """

    step: int
    steps: int
    epoch: int
    loss: float
    accuracy: float | None
    samples_per_s: float
    bytes_per_s: float
    devices: tuple[DeviceFigures, ...]


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """What a device did in a whole run; None: not known.

    Attributes:
        device: its name.
        stage: from 0.
        mode: the gradient mode.
        parameters: weights of the stage, in numbers.
        busy: share of the run it computed, 0 ... 1.
        sent_bytes: in the whole run.
        predicted_s, measured_s: computing for one step.
        predicted_memory_bytes, measured_memory_bytes: at the peak, by the tensors that the
            runtime holds; the prediction also has what one graph gives while it runs.
        reason: for the gradient mode, one sentence.
        signal_to_noise: of its estimated gradients at the end; 0: there are none.
        predicted_activation_bytes, measured_activation_bytes: of activations alone, and
            with what the running graph needs.
    """

    device: str
    stage: int
    mode: str
    parameters: int
    busy: float
    sent_bytes: int
    predicted_s: float | None = None
    measured_s: float | None = None
    predicted_memory_bytes: int | None = None
    measured_memory_bytes: int | None = None
    reason: str = ""
    signal_to_noise: float = 0.0
    predicted_activation_bytes: int | None = None
    measured_activation_bytes: int | None = None


HEADINGS: Final = (
    "device",
    "stage",
    "gradient",
    "weights",
    "busy",
    "sent",
    "step (predicted)",
    "memory (predicted)",
)
WIDE_HEADINGS: Final = (*HEADINGS, "activations (predicted)")  # where there is the room


def cells(row: DeviceRow) -> tuple[str, ...]:
    """A row as text, one cell for each of `HEADINGS`."""
    return (
        row.device,
        str(row.stage),
        row.mode,
        count_text(row.parameters),
        f"{row.busy:.0%}",
        bytes_text(row.sent_bytes),
        _beside(seconds_text(row.measured_s), seconds_text(row.predicted_s)),
        _beside(
            bytes_text(row.measured_memory_bytes), bytes_text(row.predicted_memory_bytes)
        ),
    )


def wide_cells(row: DeviceRow) -> tuple[str, ...]:
    """A row as text, one cell for each of `WIDE_HEADINGS`."""
    measured = bytes_text(row.measured_activation_bytes)
    return (*cells(row), _beside(measured, bytes_text(row.predicted_activation_bytes)))


def count_text(count: float) -> str:
    """A number in three digits: ``12.3k``."""
    value, prefix = _scaled(count)
    return f"{value}{prefix}"


def bytes_text(count: float | None) -> str:
    """Bytes in three digits: ``12.3 kB``; a dash for None."""
    if count is None:
        return "-"
    value, prefix = _scaled(count)
    return f"{value} {prefix}B"


def seconds_text(seconds: float | None) -> str:
    """Seconds in three digits: ``12.3 ms``; a dash for None."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{_three_digits(seconds * 1000)} ms"
    return f"{_three_digits(seconds)} s"


def _beside(measured: str, predicted: str) -> str:
    return f"{measured} ({predicted})"


def _scaled(count: float) -> tuple[str, str]:
    power = 0
    while abs(count) >= 999.5 and power < len(_PREFIXES) - 1:  # what rounds to 1000
        count /= 1000
        power += 1
    return _three_digits(count) if power else f"{count:.0f}", _PREFIXES[power]


def _three_digits(value: float) -> str:
    whole = len(str(math.floor(abs(value))))
    return f"{value:.{max(0, 3 - whole)}f}"
