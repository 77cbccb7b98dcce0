"""Where to cut a model into stages, and which device gets which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from edgetrain.errors import PlanError
from edgetrain.planner.assignment import Choices, Table, solve

EXACT_DEVICES: Final = 8  # up to here every order is tried: 2^D D cut tables


@dataclass(frozen=True, slots=True)
class Layer:
    """What lies between two neighbouring valid cuts of the model.

    Attributes:
        forward_s, backward_s: time of one microbatch on a device of speed 1.
        memory_bytes: what it adds to its stage's memory, whatever is in flight.
        output_bytes: of one microbatch's activations at the cut after it. The cotangents
            that come back there have the same size.
        stash_bytes: what it adds for each microbatch in flight.
    """

    forward_s: float
    backward_s: float
    memory_bytes: int
    output_bytes: int
    stash_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """A device as the planner sees it.

    Attributes:
        speed: how many times faster it is than the device the layers were timed on.
        memory_bytes: what a stage may use.
        link_bytes_per_s: what it can send; infinite for none to speak of.
    """

    name: str
    speed: float
    memory_bytes: int
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.speed > 0.0 and self.link_bytes_per_s > 0.0):
            raise PlanError(
                f"device {self.name!r} has speed {self.speed} and a link of"
                f" {self.link_bytes_per_s} B/s: both must be above 0; probe it again"
            )


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices in pipeline order, the layers of each, and the slowest stage's time."""

    devices: tuple[Device, ...]
    stages: tuple[range, ...]
    bottleneck_s: float


def partition(
    layers: Sequence[Layer],
    devices: Sequence[Device],
    in_flight: Sequence[int] | None = None,
) -> tuple[range, ...]:
    """Choose the contiguous cut that makes the slowest stage fastest.

    Minimises the bottleneck over all ways to give each device, in the order given, at
    least one layer; among those, the sum of the stages' costs, which is what filling and
    draining the pipeline takes. A stage costs the larger of its compute time (forward and
    backward) and its send time (activations downstream, cotangents upstream), as the two
    overlap once the pipeline is full.

    Args:
        layers: L layers in execution order.
        devices: D devices in pipeline order.
        in_flight: microbatches stashed at each of the D stages; by default one.

    Returns:
        D ranges into `layers`, in device order; together they cover it.

    Raises:
        PlanError: fewer layers than devices, or every cut overfills some device's memory.

    Time O(L^2 D), memory O(L^2).

    Source: Narayanan et al., PipeDream, SOSP 2019, section 3.1, without its data-parallel
    replication; per-device speeds, memory limits and the second criterion are ours.
    """
    _check_counts(len(layers), len(devices))
    choices = [[index] for index in range(len(devices))]
    return _place(_Tables(layers, devices, in_flight), devices, choices).stages


def best_order(
    layers: Sequence[Layer],
    devices: Sequence[Device],
    pinned_first: str | None = None,
    pinned_last: str | None = None,
    in_flight: Sequence[int] | None = None,
) -> Placement:
    """Choose the order of the devices and the cut together, by `partition`'s criteria.

    Exact over all orders for up to EXACT_DEVICES devices, by a dynamic programme over
    the set of devices already used. Beyond, the devices that are not pinned are taken
    from fastest to slowest, which is a guess: stage 0 stashes the most, and the memory
    that needs tends to come with speed.

    Args:
        layers: L layers in execution order.
        devices: D devices in any order, of distinct names.
        pinned_first: name of the device that must run the first stage, such as the one
            that holds the data.
        pinned_last: likewise the last stage, where the labels are.
        in_flight: microbatches stashed at each of the D stages; by default one.

    Raises:
        PlanError: as `partition`, or a pin that cannot be kept.

    Time O(2^D D L^2) up to EXACT_DEVICES devices, O(D L^2) beyond.
    """
    _check_counts(len(layers), len(devices))
    first, last = _pin(devices, pinned_first), _pin(devices, pinned_last)
    if first is not None and first == last and len(devices) > 1:
        raise PlanError(
            f"device {pinned_first!r} is pinned to both the first and the last stage, but a"
            " device runs one stage: pin only one of them, or use one device"
        )
    choices = _order_choices(devices, first, last)
    return _place(_Tables(layers, devices, in_flight), devices, choices)


class _Tables:
    """Cost and memory of every run of layers, for each device and stage.

    A table is [L + 1, L + 1]: row i and column j stand for the layers i to j - 1, and
    hold infinity where that is no layer.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        devices: Sequence[Device],
        in_flight: Sequence[int] | None,
    ) -> None:
        self._devices = devices
        self._in_flight = in_flight or [1] * len(devices)
        self._fixed_bytes = _sums([layer.memory_bytes for layer in layers])
        self._stash_bytes = _sums([layer.stash_bytes for layer in layers])
        self._compute_s = _sums([layer.forward_s + layer.backward_s for layer in layers])
        crossing = np.array([0, *(layer.output_bytes for layer in layers)], np.float64)
        crossing[-1] = 0.0  # the last stage sends no activation, the first no cotangent
        self._send_bytes = crossing[:, None] + crossing[None, :]
        self._nothing = np.tri(len(layers) + 1, dtype=np.bool_)

    def short_bytes(self, device: int, stage: int) -> Table:
        """By how much the device's memory is overfilled, at least 0."""
        need_bytes = self._fixed_bytes + self._in_flight[stage] * self._stash_bytes
        short = np.maximum(need_bytes - self._devices[device].memory_bytes, 0.0)
        return np.where(self._nothing, np.inf, short)

    def stage_s(self, device: int, stage: int) -> Table:
        """The larger of compute and send time; infinite where the memory is overfilled."""
        profile = self._devices[device]
        compute_s = self._compute_s / profile.speed
        cost_s = np.maximum(compute_s, self._send_bytes / profile.link_bytes_per_s)
        return np.where(self.short_bytes(device, stage) > 0.0, np.inf, cost_s)


def _place(tables: _Tables, devices: Sequence[Device], choices: Choices) -> Placement:
    bottleneck_s, _ = solve(tables.stage_s, choices, np.maximum)
    if math.isinf(bottleneck_s):
        raise _memory_error(tables, devices, choices)

    def within_bottleneck_s(device: int, stage: int) -> Table:
        table = tables.stage_s(device, stage)
        return np.where(table > bottleneck_s, np.inf, table)

    _, assigned = solve(within_bottleneck_s, choices, np.add)
    return Placement(
        tuple(devices[device] for device, _ in assigned),
        tuple(stage for _, stage in assigned),
        bottleneck_s,
    )


def _sums(values: Sequence[float]) -> Table:
    """[i, j] is the sum of values i to j - 1."""
    total = np.cumsum([0.0, *values])
    return np.asarray(total[None, :] - total[:, None], np.float64)


def _check_counts(layers: int, devices: int) -> None:
    if not 1 <= devices <= layers:
        raise PlanError(
            f"{devices} devices but only {max(0, layers - 1)} valid cuts in the model: it"
            f" can be split over 1 to {layers} devices"
        )


def _pin(devices: Sequence[Device], name: str | None) -> int | None:
    if name is None:
        return None
    names = [device.name for device in devices]
    if name not in names:
        raise PlanError(f"pinned device {name!r} is not among {', '.join(names)}")
    return names.index(name)


def _order_choices(
    devices: Sequence[Device], first: int | None, last: int | None
) -> list[list[int]]:
    """Every order that keeps the pins, or the fastest-first one of many devices."""
    free = [index for index in range(len(devices)) if index not in (first, last)]
    if len(devices) > EXACT_DEVICES:
        free.sort(key=lambda index: -devices[index].speed)
        order = [first, *free] if last is None else [first, *free, last]
        return [[index] for index in order if index is not None]
    choices = [free] * len(devices)
    if first is not None:
        choices[0] = [first]
    if last is not None:
        choices[-1] = [last]
    return choices


def _memory_error(
    tables: _Tables, devices: Sequence[Device], choices: Choices
) -> PlanError:
    """Name the device that is short under the cut that is kindest to memory."""
    short, assigned = solve(tables.short_bytes, choices, np.maximum)
    device, layers = next(
        (device, layers)
        for stage, (device, layers) in enumerate(assigned)
        if tables.short_bytes(device, stage)[layers.start, layers.stop] == short
    )
    return PlanError(
        f"the model does not fit: device {devices[device].name!r} is short by"
        f" {short:.0f} B even under the cut that is kindest to memory (it would run layers"
        f" {layers.start} to {layers.stop - 1}). Add a device, give it more memory, or use"
        " a smaller microbatch"
    )
