"""Predicts the seconds of work that nobody measured, and learns from what was measured.

A device's profile, or its one speed, gives seconds for the work of each op group. What
stages then really take moves a factor of the whole device, of each direction, and of each
group: from one stage on, the others are predicted better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from edgetrain.device_profile import DeviceProfile
from edgetrain.errors import ConfigError
from edgetrain.op_groups import Amounts, LayerFeatures, OpGroup, update_amount
from edgetrain.planner.rates import Direction, Rates, guessed, profiled

Vector = npt.NDArray[np.float64]

_RUN: Final = "run"
_TERMS: Final = (*OpGroup, _RUN)
_HALF: Final = len(_TERMS)  # factors of the forward come first, then the backward's
_SIZE: Final = 2 * _HALF
_INDEX: Final = {term: number for number, term in enumerate(_TERMS)}

# Standard deviations, before anything is learnt: how far a whole device, one direction and
# one group may be from what its profile says; and what no factors explain of a stage.
DEVICE: Final = 1.0
DIRECTION: Final = 0.2
GROUP: Final = 0.3
MEASURED: Final = 0.1
KEPT: Final = 0.97  # of what was learnt counts after the next measurement
LOWEST, HIGHEST = 0.02, 50.0  # factors beyond these are not believed
MAX_BYTES: Final = 1 << 18
MAX_SECONDS: Final = 1e6
LEAST_S: Final = 1e-12  # of a prediction that can be compared with anything


class _Stored(msgspec.Struct, frozen=True):
    rates: Rates
    precision: tuple[tuple[float, ...], ...]
    weighted: tuple[float, ...]
    measurements: int
    format: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class LatencyModel:
    """One device's, in one gradient mode's graphs: exact (`vjp`) or frozen stages.

    With x the seconds that the rates give for each term (direction and op group, and the
    fixed cost of a run), a stage takes sum of x m. The factors m have a normal prior about
    1 whose covariance is DEVICE^2 for any two, DIRECTION^2 more within a direction, and
    GROUP^2 more for each itself. Each measured stage is one more row, x / sum x with its
    seconds / sum x, of a ridge regression kept as its normal equations: precision m =
    weighted. Older rows fade towards the prior.

    Attributes:
        rates: of a profile, or guessed.
        precision: [2T, 2T], T terms.
        weighted: [2T].
        measurements: rows learnt.

    Cost: 2T = 30, so microseconds for a prediction, and a solve for each row learnt.

    Source: AccEPT (Chen et al. 2023) for a latency model that keeps learning; its features
    and code are not public. Recursive least squares with stabilised forgetting after
    Kulhavy and Zarrop (1993). Op groups beside convolution and the optimizer after SimDIT
    (Esmaeilzadeh et al. 2023). Ours: the shared factors, which carry one stage's surprise
    to all other work.
    """

    rates: Rates
    precision: Vector
    weighted: Vector
    measurements: int
    factors: Vector

    @classmethod
    def of(cls, profile: DeviceProfile) -> LatencyModel:
        """Start from a measured profile."""
        return cls._fresh(profiled(profile))

    @classmethod
    def of_speed(cls, flop_per_s: float) -> LatencyModel:
        """Start from one speed, for a device without a profile.

        Raises:
            ConfigError: the speed is not positive and finite.
        """
        if not (math.isfinite(flop_per_s) and flop_per_s > 0):
            raise ConfigError(f"flop_per_s is {flop_per_s}: it must be finite and above 0")
        return cls._fresh(guessed(flop_per_s))

    def forward_s(self, features: LayerFeatures) -> float:
        """Seconds of one run of a stage's forward."""
        return self._seconds(self._forward(features))

    def backward_s(self, features: LayerFeatures) -> float:
        """Seconds of one run of its backward; 0 where nothing of it runs."""
        return self._seconds(self._backward(features))

    def fused_s(self, features: LayerFeatures) -> float:
        """Seconds of one run of both in one graph, as the last stage runs them."""
        return self._seconds(self._fused(features))

    def update_s(self, features: LayerFeatures, optimizer: str) -> float:
        """Seconds of one update of its weights.

        Args:
            features: of a stage.
            optimizer: see `update_amount`.

        Raises:
            ConfigError: an unknown optimizer.
        """
        amount = update_amount(optimizer, features.trainable_elements)
        return self._seconds(_row(self.rates.forward, {OpGroup.OPTIMIZER: amount}, 0))

    def learn(
        self,
        features: LayerFeatures,
        forward_s: float,
        backward_s: float,
        *,
        fused: bool = False,
    ) -> LatencyModel:
        """The model after a stage was measured.

        Args:
            features: of the stage.
            forward_s: of one microbatch; 0: it was not run, and is passed over.
            backward_s: likewise.
            fused: the stage runs both in one graph, which takes the sum of the two.

        Raises:
            ConfigError: a time is negative or not finite.
        """
        for name, seconds in (("forward_s", forward_s), ("backward_s", backward_s)):
            if not 0 <= seconds <= MAX_SECONDS:
                raise ConfigError(
                    f"{name} of a stage is {seconds}: it must be in 0 ... {MAX_SECONDS:g}"
                )
        if fused:
            return self._learnt(self._fused(features), forward_s + backward_s)
        model = self._learnt(self._forward(features), forward_s)
        return model._learnt(self._backward(features), backward_s)  # noqa: SLF001

    def encode(self) -> bytes:
        """As JSON."""
        stored = _Stored(
            self.rates,
            tuple(tuple(map(float, row)) for row in self.precision),
            tuple(map(float, self.weighted)),
            self.measurements,
        )
        return msgspec.json.encode(stored)

    @classmethod
    def decode(cls, data: bytes) -> LatencyModel:
        """Parse a model.

        Raises:
            ConfigError: it is none, or its numbers cannot be used.
        """
        if len(data) > MAX_BYTES:
            raise ConfigError(f"not a latency model: {len(data)} B, over {MAX_BYTES} B")
        try:
            stored = msgspec.json.decode(data, type=_Stored)
            precision = np.array(stored.precision, np.float64)
            weighted = np.array(stored.weighted, np.float64)
            _check(stored, precision, weighted)
            return cls._solved(stored.rates, precision, weighted, stored.measurements)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ConfigError(f"not a latency model: {error}") from error

    @classmethod
    def _fresh(cls, rates: Rates) -> LatencyModel:
        return cls._solved(rates, PRIOR, PRIOR @ np.ones(_SIZE), 0)

    @classmethod
    def _solved(
        cls, rates: Rates, precision: Vector, weighted: Vector, measurements: int
    ) -> LatencyModel:
        factors = np.clip(np.linalg.solve(precision, weighted), LOWEST, HIGHEST)
        return cls(rates, precision, weighted, measurements, factors)

    def _learnt(self, row: Vector, seconds: float) -> LatencyModel:
        if not (seconds > 0 and row.sum() > LEAST_S):
            return self
        expected_s = row.sum()
        share = row / expected_s / MEASURED
        ratio = float(np.clip(seconds / expected_s, LOWEST, HIGHEST)) / MEASURED
        return self._solved(
            self.rates,
            KEPT * self.precision + (1 - KEPT) * PRIOR + np.outer(share, share),
            KEPT * self.weighted + (1 - KEPT) * PRIOR @ np.ones(_SIZE) + share * ratio,
            self.measurements + 1,
        )

    def _seconds(self, row: Vector) -> float:
        return float(row @ self.factors)

    def _forward(self, features: LayerFeatures) -> Vector:
        return _row(self.rates.forward, features.forward, 0, runs=1)

    def _backward(self, features: LayerFeatures) -> Vector:
        runs = 1 if features.backward else 0
        return _row(self.rates.backward, features.backward, _HALF, runs=runs)

    def _fused(self, features: LayerFeatures) -> Vector:
        back = _row(self.rates.backward, features.backward, _HALF)
        return self._forward(features) + back


def _prior() -> Vector:
    """Precision [2T, 2T] of the factors before anything is learnt."""
    covariance = np.full((_SIZE, _SIZE), DEVICE**2)
    for half in (slice(0, _HALF), slice(_HALF, _SIZE)):
        covariance[half, half] += DIRECTION**2
    covariance[np.diag_indices(_SIZE)] += GROUP**2
    return np.linalg.inv(covariance)


PRIOR: Final = _prior()
PRIOR.setflags(write=False)


def _row(direction: Direction, amounts: Amounts, first: int, *, runs: int = 0) -> Vector:
    """Seconds of each term [2T]; those of this direction begin at `first`."""
    row = np.zeros(_SIZE)
    for group, seconds in direction.terms(amounts).items():
        row[first + _INDEX[group]] = seconds
    row[first + _INDEX[_RUN]] = runs * direction.run_s
    return row


def _check(stored: _Stored, precision: Vector, weighted: Vector) -> None:
    if stored.format != 1:
        raise ValueError(f"format {stored.format}, this edgetrain reads 1")
    if precision.shape != (_SIZE, _SIZE) or weighted.shape != (_SIZE,):
        raise ValueError(f"not of {_SIZE} factors")
    if not (np.isfinite(precision).all() and np.isfinite(weighted).all()):
        raise ValueError("a number is not finite")
    if not np.allclose(precision, precision.T) or np.linalg.eigvalsh(precision)[0] <= 0:
        raise ValueError("its precision is not symmetric and positive")
