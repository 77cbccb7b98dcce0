"""The states of the exact search, and one sweep over them from the last stage backwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from edgetrain.planner.costs import Table
from edgetrain.planner.problem import Device

Indices = npt.NDArray[np.intp]
# (type, stages to the end) -> what to combine and keep small; infinite: not allowed
TableOf = Callable[[int, int], Table]
Combine = Callable[..., Table]  # np.add or np.maximum

_CHUNK: Final = 512  # states at a time: what a processor's cache holds


class Space:
    """How many devices of each type are used: one count vector is one state.

    Args:
        counts: devices of each type, all at least 1.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.size = math.prod(count + 1 for count in counts)
        self.strides = tuple(
            math.prod(count + 1 for count in counts[:kind]) for kind in range(len(counts))
        )
        states = np.arange(self.size)
        self.used = [
            states // stride % (count + 1)
            for stride, count in zip(self.strides, counts, strict=True)
        ]
        self.level = np.asarray(sum(self.used, np.zeros_like(states)), np.intp)
        self._by_level = [
            np.flatnonzero(self.level == level) for level in range(sum(counts) + 1)
        ]

    def sources(self, level: int, kind: int) -> Indices:
        """States of a level that have a device of the type left."""
        states = self._by_level[level]
        return np.asarray(states[self.used[kind][states] < self.counts[kind]])


class Sweep:
    """The least combined cost of every state, from one origin.

    `least` [L + 1, states]: entry i of a state is the least cost of covering the layers
    from i on with exactly the devices of the state, after what the origin covers.

    Time O(states * types * L * W) for tables that hold W layers in a stage at the most.

    Args:
        space: of count vectors.
        tables: see `TableOf`; a stage is `offset` + the devices used, from the end.
        origin: [L + 1], the cost of what is covered before any device is used.
        combine: `np.add` or `np.maximum`.
        depth: devices to use at the most.
        offset: stages the origin stands for.
    """

    def __init__(  # noqa: PLR0913  a search has this many parts
        self,
        space: Space,
        tables: TableOf,
        origin: Table,
        *,
        combine: Combine,
        depth: int,
        offset: int = 0,
    ) -> None:
        self._space = space
        self._tables = tables
        self._combine = combine
        self._offset = offset
        self.work = 0  # table entries combined
        self.least = np.full((len(origin), space.size), np.inf)
        self.least[:, 0] = origin
        for level in range(depth):
            bands = [
                _bands(tables(kind, offset + level + 1))
                for kind in range(len(space.counts))
            ]
            for kind, diagonals in enumerate(bands):
                self._extend(space.sources(level, kind), kind, diagonals)

    def _extend(
        self, sources: Indices, kind: int, diagonals: Sequence[tuple[int, Table]]
    ) -> None:
        """Put one stage of the type before what each source state covers."""
        for start in range(0, len(sources), _CHUNK):
            chunk = sources[start : start + _CHUNK]
            before = self.least[:, chunk]
            targets = chunk + self._space.strides[kind]
            after = self.least[:, targets]
            reached = np.flatnonzero(np.isfinite(before).any(axis=1))
            if not len(reached):
                continue
            low, high = int(reached[0]), int(reached[-1]) + 1
            for width, cost in diagonals:
                first, last = max(low - width, 0), high - width
                if last <= first:
                    continue
                through = self._combine(
                    before[first + width : last + width], cost[first:last, None]
                )
                np.minimum(after[first:last], through, out=after[first:last])
                self.work += through.size
            self.least[:, targets] = after

    def trace(self, state: int, begin: int) -> list[tuple[int, range]]:
        """The type and layers of each stage that a state and first layer stand for."""
        stages = []
        while state:
            kind, end = self._step(state, begin)
            stages.append((kind, range(begin, end)))
            state, begin = state - self._space.strides[kind], end
        return stages

    def _step(self, state: int, begin: int) -> tuple[int, int]:
        to_end = self._offset + int(self._space.level[state])
        wanted = self.least[begin, state]
        for kind, stride in enumerate(self._space.strides):
            if self._space.used[kind][state]:
                row = self._tables(kind, to_end)[begin]
                through = self._combine(self.least[:, state - stride], row)
                ends = np.flatnonzero((through == wanted) & (row < np.inf))
                if len(ends):
                    return kind, int(ends[0])
        raise AssertionError("a finite state has a stage that leads to it")


def grouped(devices: Sequence[Device]) -> tuple[list[Device], list[list[str]]]:
    """One device of each type, and the names of all that are of it, both in name order."""
    names: dict[tuple[object, ...], list[str]] = {}
    first: dict[tuple[object, ...], Device] = {}
    for device in sorted(devices, key=lambda device: device.name):
        first.setdefault(device.kind, device)
        names.setdefault(device.kind, []).append(device.name)
    return list(first.values()), list(names.values())


def _bands(table: Table) -> list[tuple[int, Table]]:
    """(layers in the stage, their cost by first layer), where any is finite."""
    rows, columns = np.nonzero(np.isfinite(table))
    return [(int(w), np.diagonal(table, w)) for w in np.unique(columns - rows)]
