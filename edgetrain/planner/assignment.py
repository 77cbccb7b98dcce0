"""Which device takes which run of layers, given what each would cost: the search itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]
# (device, stage) -> [L + 1, L + 1]: row i, column j is the cost of the layers i to j - 1,
# infinite where they cannot be a stage
TableOf = Callable[[int, int], Table]
Choices = Sequence[Sequence[int]]  # per stage, the devices that may run it
Combine = Callable[[Table, Table], Table]
_Indices = npt.NDArray[np.intp]


def solve(
    table_of: TableOf, choices: Choices, combine: Combine
) -> tuple[float, tuple[tuple[int, range], ...]]:
    """Find the devices and ranges whose combined cost is least.

    Returns the cost and, stage by stage, the device and its layers; infinity and nothing
    when every assignment holds an infinite entry.

    Works forward over the stages. A state is the set of devices used so far, as a bit
    mask, with the least cost of covering the first j layers for every j.
    """
    layers = len(table_of(0, 0)) - 1
    start = np.full(layers + 1, np.inf)
    start[0] = 0.0
    states = {0: start}
    # (mask, j) -> the device of the last stage, and its first layer
    came_from: dict[int, tuple[_Indices, _Indices]] = {}
    for stage, candidates in enumerate(choices):
        reached: dict[int, Table] = {}
        tables = {device: table_of(device, stage) for device in candidates}
        for mask, cost in states.items():
            for device, table in tables.items():
                target = mask | 1 << device
                if target == mask:
                    continue
                through = combine(cost[:, None], table)
                begin = through.argmin(axis=0)
                through = np.take_along_axis(through, begin[None, :], axis=0)[0]
                if target not in reached:
                    reached[target] = np.full(layers + 1, np.inf)
                    came_from[target] = (np.zeros_like(begin), np.zeros_like(begin))
                better = through < reached[target]
                reached[target][better] = through[better]
                came_from[target][0][better] = device
                came_from[target][1][better] = begin[better]
        states = reached
    ((mask, cost),) = states.items()
    least = float(cost[layers])
    return least, () if math.isinf(least) else _trace(came_from, mask, layers)


def _trace(
    came_from: dict[int, tuple[_Indices, _Indices]],
    mask: int,
    end: int,
) -> tuple[tuple[int, range], ...]:
    assigned = []
    while mask in came_from:
        device, begin = (int(entry[end]) for entry in came_from[mask])
        assigned.append((device, range(begin, end)))
        mask, end = mask & ~(1 << device), begin
    return tuple(reversed(assigned))
