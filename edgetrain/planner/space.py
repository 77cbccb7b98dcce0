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

    def kinds(self, state: int) -> list[int]:
        """Types whose stage may be the first of a state's."""
        return [kind for kind, used in enumerate(self.used) if used[state]]


class Chain(Space):
    """Devices in a fixed order: state n has used the last n of `count`, a type each."""

    def __init__(self, count: int) -> None:
        self.counts = (1,) * count
        self.size = count + 1
        self.strides = (1,) * count
        self.level = np.arange(count + 1)
        self.used = [
            np.asarray(self.level >= count - kind, np.intp) for kind in range(count)
        ]

    def sources(self, level: int, kind: int) -> Indices:
        return np.array([level] if kind == len(self.counts) - 1 - level else [], np.intp)

    def kinds(self, state: int) -> list[int]:
        return [len(self.counts) - state]


class Sweep:
    """The least combined cost of every state, from one origin.

    `least` [states, L + 1]: entry i of a state is the least cost of covering the layers
    from i on with exactly the devices of the state, after what the origin covers;
    infinite too where the devices that are left cannot cover the layers before i.

    Layers have weights, and no stage of a type can weigh more than the heaviest that its
    tables allow. So a state reaches only rows that its devices can carry, and only rows
    whose rest the other devices can carry are of use: with a cap near the optimum, few.

    Time O(states * types * L * W) for tables that allow W layers in a stage at the most.

    Args:
        space: of count vectors.
        tables: see `TableOf`; a stage is `offset` + the devices used, from the end.
        origin: [L + 1], the cost of what is covered before any device is used.
        combine: `np.add` or `np.maximum`.
        depth: devices to use at the most.
        offset: stages the origin stands for.
        weights: [L] of the layers, any numbers of 0 or more.
        head: the most that the stage before the sweep's can weigh.
    """

    def __init__(  # noqa: PLR0913  a search has this many parts
        self,
        space: Space,
        tables: TableOf,
        origin: Table,
        *,
        combine: Combine,
        depth: int,
        weights: Table,
        offset: int = 0,
        head: float = 0.0,
    ) -> None:
        self._space = space
        self._tables = tables
        self._combine = combine
        self._offset = offset
        self.work = 0  # table entries combined
        self.least = np.full((space.size, len(origin)), np.inf)
        self.least[0] = origin
        before = np.concatenate([[0.0], np.cumsum(weights)])
        bands: list[tuple[int, Indices, list[tuple[int, Table]]]] = []
        heaviest = [0.0] * len(space.counts)
        for level in range(depth):
            for kind in range(len(space.counts)):
                sources = space.sources(level, kind)
                if len(sources):
                    diagonals = _bands(tables(kind, offset + level + 1))
                    weight = _heaviest(diagonals, before)
                    heaviest[kind] = max(heaviest[kind], weight)
                    bands.append((kind, sources, diagonals))
        self._carried = np.asarray(
            sum((h * space.used[k] for k, h in enumerate(heaviest)), np.zeros(space.size))
        )
        self._before = before
        covered = np.flatnonzero(np.isfinite(origin))
        self._start = before[covered[0] if len(covered) else -1]
        self._total = head + float(self._carried.max())
        for kind, sources, diagonals in bands:
            self._extend(sources, kind, diagonals)

    def _extend(
        self, sources: Indices, kind: int, diagonals: Sequence[tuple[int, Table]]
    ) -> None:
        """Put one stage of the type before what each source state covers."""
        sources = sources[np.argsort(self._carried[sources], kind="stable")]
        for start in range(0, len(sources), _CHUNK):
            chunk = sources[start : start + _CHUNK]
            targets = chunk + self._space.strides[kind]
            top, end = self._rows(targets)
            if end <= top or not diagonals:
                continue
            before = self._columns(chunk, top, end + diagonals[-1][0])
            after = self._columns(targets, top, end)
            reached = np.flatnonzero(np.isfinite(before).any(axis=1))
            if not len(reached):
                continue
            low, high = int(reached[0]), int(reached[-1]) + 1
            for width, cost in diagonals:
                first, last = max(low - width, 0), min(high - width, end - top)
                if last <= first:
                    continue
                through = self._combine(
                    before[first + width : last + width],
                    cost[top + first : top + last, None],
                )
                np.minimum(after[first:last], through, out=after[first:last])
                self.work += through.size
            self.least[targets, top:end] = after.T

    def _columns(self, states: Indices, top: int, end: int) -> Table:
        """Rows of some states, states along the last axis, where numpy is fastest."""
        return np.ascontiguousarray(self.least[states, top:end].T)

    def _rows(self, targets: Indices) -> tuple[int, int]:
        """The rows that are of use to any of the states, which come by what they carry."""
        slack = 1e-9 * (self._total + self._before[-1])
        least, most = self._carried[targets[0]], self._carried[targets[-1]]
        top = np.searchsorted(self._before, self._start - most - slack)
        rest = self._total - least + slack
        return int(top), int(np.searchsorted(self._before, rest, side="right"))

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
        wanted = self.least[state, begin]
        for kind in self._space.kinds(state):
            row = self._tables(kind, to_end)[begin]
            before = self.least[state - self._space.strides[kind]]
            through = self._combine(before, row)
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


def _heaviest(bands: Sequence[tuple[int, Table]], before: Table) -> float:
    """The most that a stage of these tables weighs."""
    most = 0.0
    for width, cost in bands:
        weights = before[width:] - before[: len(before) - width]
        most = max(most, float(weights[np.isfinite(cost)].max()))
    return most
