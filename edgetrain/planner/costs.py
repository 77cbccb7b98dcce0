"""Tables of what every run of layers costs on every type of device.

A table is [L + 1, L + 1]: row i, column j stand for a stage of the layers i to j - 1, and
hold infinity where that is no stage. They hold the costs that `placement.evaluate` states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from edgetrain.planner.placement import crossing_bytes
from edgetrain.planner.problem import PLAIN, RECOMPUTE, Device, Problem

_TABLE_ENTRIES: Final = 30_000_000  # kept at once, 8 bytes each

Table = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Of every run of layers, on one type and so far from the end.

    Attributes:
        load_s: for which one microbatch holds the processor or the link, the longer;
            infinite where the stage does not fit the memory.
        short_bytes: by which it overfills the memory, with the option that saves the most.
        fill_s: of one microbatch on its way through the empty pipeline.
    """

    load_s: Table
    fill_s: Table
    short_bytes: Table


class Costs:
    """All tables of a problem, made when first asked for."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        layers = problem.layers
        count = len(layers)
        self._nothing = np.tri(count + 1, dtype=np.bool_)
        self._fixed_bytes = sums([layer.memory_bytes for layer in layers])
        self._stash_bytes = sums([layer.stash_bytes for layer in layers])
        crossing = [crossing_bytes(problem, cut) for cut in range(count + 1)]
        self.down_bytes = np.array([down for down, _ in crossing])
        self.back_bytes = np.array([back for _, back in crossing])
        received = [problem.input_bytes, *(layer.received_bytes for layer in layers)]
        self._received_bytes = np.array(received, np.float64)
        inner = np.arange(count + 1) % count > 0
        self._sends_down = inner.astype(np.float64)
        self._sends_back = self._sends_down if problem.training else 0.0 * inner
        self._made: dict[tuple[str, int], StageCosts] = {}
        self._traffic = self._count_traffic()
        self._room = max(1, _TABLE_ENTRIES // (3 * (count + 1) ** 2))

    def need_bytes(self, peak: int, option: str) -> Table:
        if option == PLAIN:
            return self._fixed_bytes + peak * self._stash_bytes
        received = peak * self._received_bytes[:, None]
        return np.asarray(self._fixed_bytes + received + self._stash_bytes)

    def least_bytes(self, peak: int) -> Table:
        """What a stage needs with the option that saves the most."""
        options = [self.need_bytes(peak, option) for option in self._problem.options]
        return np.asarray(np.minimum.reduce(options))

    def compute_s(self, device: Device, option: str) -> Table:
        forward_s = sums(device.forward_s)
        if not self._problem.training:
            return forward_s
        both_s = forward_s + sums(device.backward_s)
        return both_s + forward_s if option == RECOMPUTE else both_s

    def link_s(self, device: Device) -> Table:
        return self.held_s(device, self._traffic)

    def _count_traffic(self) -> tuple[Table, Table, Table]:
        """Of every run of layers: bytes up, bytes down, and messages sent."""
        down, back = self.down_bytes, self.back_bytes
        up_bytes = down[None, :] + back[:, None]
        down_bytes = down[:, None] + back[None, :]
        messages = self._sends_down[None, :] + self._sends_back[:, None]
        return up_bytes, down_bytes, messages

    def held_s(self, device: Device, traffic: tuple[Table, Table, Table]) -> Table:
        """For how long the device's link is held by so much traffic."""
        up_bytes, down_bytes, messages = traffic
        if self._problem.topology == "broker":
            up_bytes = np.maximum(up_bytes, down_bytes)
        overhead_s = messages * self._problem.hop_overhead_s
        return np.asarray(up_bytes / device.link_bytes_per_s + overhead_s)

    def hops_s(self, device: Device) -> Table:
        """The device's part in the hops of one microbatch's way through and back."""
        up_bytes, down_bytes, messages = self._traffic
        per_message_s = device.latency_s + self._problem.hop_overhead_s
        hops_s = up_bytes / device.link_bytes_per_s + messages * per_message_s
        if self._problem.topology == "broker":
            received = self._sends_down[:, None] + self._sends_back[None, :]
            hops_s = hops_s + down_bytes / device.link_bytes_per_s
            hops_s = hops_s + received * device.latency_s
        return np.asarray(hops_s)

    def broker_s(self) -> Table:
        """For how long the broker is held by what a stage sends."""
        up_bytes, _, _ = self._traffic
        if self._problem.topology != "broker":
            return np.zeros_like(up_bytes)
        return np.asarray(up_bytes / self._problem.broker_bytes_per_s)

    def stage(self, device: Device, to_end: int) -> StageCosts:
        """Of a stage on the device, `to_end` stages from the end."""
        key = (device.name, self._problem.peak(to_end))
        if key not in self._made:
            if len(self._made) == self._room:
                self._made.clear()
            self._made[key] = self._stage(device, key[1])
        return self._made[key]

    def _stage(self, device: Device, peak: int) -> StageCosts:
        compute_s = np.full_like(self._fixed_bytes, np.inf)
        for option in self._problem.options:
            fits = self.need_bytes(peak, option) <= device.memory_bytes
            time_s = np.where(fits, self.compute_s(device, option), np.inf)
            compute_s = np.minimum(compute_s, time_s)
        compute_s[self._nothing] = np.inf
        able = np.isfinite(self.compute_s(device, PLAIN)) & ~self._nothing
        short_bytes = np.maximum(self.least_bytes(peak) - device.memory_bytes, 0.0)
        return StageCosts(
            np.maximum(compute_s, self.link_s(device)),
            compute_s + self.hops_s(device),
            np.where(able, short_bytes, np.inf),
        )

    def both_ends(self, device: Device, peak: int) -> tuple[StageCosts, Table]:
        """Of a device that runs the first layers and the last ones, and its broker time.

        In these tables row a, column z stand for the layers before a and those from z on,
        with some stage between. `peak` microbatches are stashed of the first.
        """
        compute_s = np.full_like(self._fixed_bytes, np.inf)
        least_bytes = ends(self.least_bytes(peak), self.least_bytes(self._problem.peak(1)))
        for first in self._problem.options:
            for last in self._problem.options:
                held_bytes = ends(
                    self.need_bytes(peak, first),
                    self.need_bytes(self._problem.peak(1), last),
                )
                time_s = ends(self.compute_s(device, first), self.compute_s(device, last))
                fits = held_bytes <= device.memory_bytes
                compute_s = np.minimum(compute_s, np.where(fits, time_s, np.inf))
        able = np.isfinite(ends(*[self.compute_s(device, PLAIN)] * 2)) & ~self._nothing
        able[0] = able[:, -1] = False
        compute_s[~able] = np.inf
        up, down, messages = (ends(table, table) for table in self._traffic)
        hops_s = self.hops_s(device)
        broker_s = self.broker_s()
        return StageCosts(
            np.maximum(compute_s, self.held_s(device, (up, down, messages))),
            compute_s + ends(hops_s, hops_s),
            np.where(able, np.maximum(least_bytes - device.memory_bytes, 0.0), np.inf),
        ), ends(broker_s, broker_s)


def ends(first: Table, last: Table) -> Table:
    """[a, z] is the first table's cost of layers 0 to a - 1 plus the last's from z on."""
    return np.asarray(first[0][:, None] + last[:, -1][None, :])


def sums(values: Sequence[float]) -> Table:
    """[i, j] is the sum of values i to j - 1, and infinite if one of those is."""
    given = np.array(values, np.float64)
    endless = np.isinf(given)
    total = np.concatenate([[0.0], np.cumsum(np.where(endless, 0.0, given))])
    table = np.asarray(total[None, :] - total[:, None], np.float64)
    if endless.any():
        many = np.concatenate([[0], np.cumsum(endless)])
        table = np.where(many[None, :] > many[:, None], math.inf, table)
    return table
