"""From a device's measured cases to what a flop, a byte and a node of each group cost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from edgetrain.device_profile import Case, DeviceProfile
from edgetrain.op_groups import Amount, Amounts, OpGroup

Vector = npt.NDArray[np.float64]

RIDGE: Final = (
    1e-6  # of the scaled columns: decides between what the cases do not tell apart
)
ROUNDS: Final = 8
MAX_RATE_S: Final = 3600.0
LEAST_SHARE: Final = 0.05  # of a case's seconds that is its work, however short it is
# Without a profile, by one speed: what it might do in the time of each.
_FLOP_A_BYTE: Final = 2.0
_FLOP_A_NODE: Final = 5e4
_FLOP_A_RUN: Final = 5e5
_BACKWARD: Final = 2.0  # times a forward


class Rate(msgspec.Struct, frozen=True):
    """Seconds a flop, a byte and a node; none is negative."""

    flop_s: float
    byte_s: float
    node_s: float

    def __post_init__(self) -> None:
        for value in (self.flop_s, self.byte_s, self.node_s):
            if not 0 <= value <= MAX_RATE_S:
                raise ValueError(f"a rate is {value}: it must be in 0 ... {MAX_RATE_S:g}")

    def seconds(self, amount: Amount) -> float:
        return (
            self.flop_s * amount.flop
            + self.byte_s * amount.nbytes
            + self.node_s * amount.nodes
        )


class Direction(NamedTuple):
    """Of one direction of a pass: what a run costs, and by group what its work does.

    A group that was not measured costs as all measured ones together: `other`.
    """

    run_s: float
    groups: Mapping[str, Rate]
    other: Rate

    def terms(self, amounts: Amounts) -> dict[OpGroup, float]:
        """Seconds of the work, by group."""
        return {
            group: self.groups.get(group, self.other).seconds(amount)
            for group, amount in amounts.items()
        }


class Rates(msgspec.Struct, frozen=True):
    """What a device needs for any work."""

    forward: Direction
    backward: Direction


def profiled(profile: DeviceProfile) -> Rates:
    """Fit the rates of a profile's groups, forward and backward.

    Cost: an exact non-negative fit of three numbers for each group.
    """
    return Rates(
        _direction(profile, [(case, case.forward_s) for case in profile.cases]),
        _direction(profile, [(c, c.backward_s) for c in profile.cases if c.backward_s > 0]),
    )


def guessed(flop_per_s: float) -> Rates:
    """What a device does of which only the speed of matrix products is known."""
    rate = Rate(1 / flop_per_s, _FLOP_A_BYTE / flop_per_s, _FLOP_A_NODE / flop_per_s)
    back = Rate(*(_BACKWARD * value for value in msgspec.structs.astuple(rate)))
    run_s = _FLOP_A_RUN / flop_per_s
    return Rates(Direction(run_s, {}, rate), Direction(run_s, {}, back))


def _direction(profile: DeviceProfile, timed: Sequence[tuple[Case, float]]) -> Direction:
    run_s = profile.run_overhead_s
    found: dict[str, Rate] = {}
    work: list[tuple[Amount, float]] = []
    for group in OpGroup:
        # An update is no run of the engine.
        fixed_s = 0.0 if group is OpGroup.OPTIMIZER else run_s
        own = [
            (case.amount, max(seconds - fixed_s, LEAST_SHARE * seconds))
            for case, seconds in timed
            if case.group == group
        ]
        if own:
            found[group] = fit(own)
        if group is not OpGroup.OPTIMIZER:
            work.extend(own)
    return Direction(run_s, found, fit(work) if work else guessed(1e9).forward.other)


def fit(cases: Sequence[tuple[Amount, float]]) -> Rate:
    """The non-negative rates that fit best in proportion.

    Args:
        cases: amounts of work and their seconds, above 0.

    Returns:
        The minimum of sum (predicted - measured)^2 / (predicted measured), in which half
        and twice are equally wrong, by least squares of a few rounds of weights. Each round
        is exact, with a little ridge: of every subset of the three columns, the best
        without a negative number.
    """
    rows = np.array([(a.flop, a.nbytes, a.nodes) for a, _ in cases], np.float64)
    seconds = np.array([s for _, s in cases], np.float64)
    predicted = seconds
    best = np.zeros(3)
    for _ in range(ROUNDS):
        weights = 1 / np.sqrt(seconds * np.clip(predicted, seconds / 10, seconds * 10))
        best = _least_squares(rows * weights[:, None], seconds * weights)
        predicted = rows @ best
    return Rate(*map(float, best))


def _least_squares(rows: Vector, goal: Vector) -> Vector:
    """The exact non-negative solution of [n, 3] rows, with a little ridge."""
    scale = np.sqrt((rows**2).sum(0))
    used = [column for column in range(3) if scale[column] > 0]
    best, least = np.zeros(3), np.inf
    for count in range(1, len(used) + 1):
        for subset in itertools.combinations(used, count):
            columns = list(subset)
            x = rows[:, columns] / scale[columns]
            solution = np.linalg.solve(x.T @ x + RIDGE * np.eye(count), x.T @ goal)
            if solution.min() < 0:
                continue
            error = float(((x @ solution - goal) ** 2).sum())
            error += RIDGE * float((solution**2).sum())
            if error < least:
                least, best = error, np.zeros(3)
                best[columns] = solution / scale[columns]
    return best
