"""Quantised weights moved by whole steps of their grids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgetrain.manifest import HIGHEST, LOWEST, Manifest, WeightSpec, view
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.estimators.moved_weights import MovedWeights
from edgetrain.runtime.estimators.noise import NoiseKey, signs
from edgetrain.runtime.parameters import Parameters

Array = npt.NDArray[np.float32]

FLOAT_STEP: Final = 1e-2  # of weights that are not quantised, where no others are estimated


@dataclass(frozen=True, slots=True)
class Move:
    """A weight moved to either side, and by how much: half the way from `down` to `up`."""

    up: Array
    down: Array
    by: Array


def on_levels(weight: Array, steps: Array, sign: Array, count: int) -> Move:
    """Move a weight by whole steps of its grid, from the grid's value nearest to it.

    It stops at the grid's ends. There it moves to one side only and half as far, and `by`
    says so; it never stays, not even where the weight lies beyond its grid.

    Args:
        weight: the float weight.
        steps: of its grid, in a shape that goes with the weight's.
        sign: 1 or -1 for each element.
        count: of steps.
    """
    level = np.clip(np.rint(weight / steps), LOWEST, HIGHEST)
    up, down = (
        np.clip(level + np.float32(n) * sign, LOWEST, HIGHEST) for n in (count, -count)
    )
    return Move(up * steps, down * steps, (up - down) * (steps / 2))


class MovedLevels(MovedWeights):
    """Moves weights where the forward rounds them to a grid, for gradients along it.

    With Q the forward that rounds, q its value of a weight nearest to W, and V = +-n steps
    of the grid, each sign with probability 1/2, the gradient is estimated along V::

        s = <c, Q(x; q + V) - Q(x; q - V)> / 2        gradient = s / V

    element by element, as E[V_i / V_j] = 0. Weights that are not quantised, such as
    biases, are moved by as much as the others in the mean. What the estimate is off by:

    - it is the slope between levels, at q and not at W, which is up to half a step away;
    - where W is at an end of its grid, or beyond, it is the slope to one side, within;
    - activations are rounded as well, which adds noise; where one is clipped, nothing
      passes, and no gradient of a smooth function would say so.

    More steps a move make the slope one over a longer way, which is less of a gradient.

    Source: as `MovedWeights`; moving by whole steps is ours.
    """

    def __init__(self, manifest: Manifest, parameters: Parameters, seed: int) -> None:
        super().__init__(manifest, parameters, seed)
        self._count = manifest.estimator.move_lsb
        self._last = Tick(0, 0), 0
        self._float_step = np.float32(self._count * _mean_step(self.estimated))

    def move(self, tick: Tick, k: int, size: float) -> None:
        """Set the buffer to the weights moved along noise number `k`, 1, or against it, -1.

        What does not train stays as it is; the forward rounds it.
        """
        self._last = tick, k
        np.copyto(self.buffer, self._parameters.weights)
        for weight in self.estimated:
            move = self._move(tick, k, weight)
            view(self.buffer, weight)[...] = move.up if size > 0 else move.down

    def mirror(self) -> None:
        """Set the buffer to the other side; signs cost so little that they are redrawn."""
        self.move(*self._last, -1.0)

    def contract(self, tick: Tick, slopes: npt.NDArray[Any]) -> None:
        """See `MovedWeights.contract`; the slopes are by the whole of each move."""
        for weight in self.estimated:
            part = view(self._parameters.scratch, weight)
            part[...] = 0
            for k, slope in enumerate(slopes):
                part += np.float32(slope / len(slopes)) / self._move(tick, k, weight).by

    def _move(self, tick: Tick, k: int, weight: WeightSpec) -> Move:
        key = NoiseKey(self._seed, tick.step, tick.microbatch, weight.layer, k)
        sign = signs(key, weight.shape)
        w = view(self._parameters.weights, weight)
        if weight.lsb:
            return on_levels(w, weight.steps, sign, self._count)
        by = self._float_step * sign
        return Move(w + by, w - by, by)


def _mean_step(weights: Iterable[WeightSpec]) -> float:
    """The root mean square over all elements of quantised weights."""
    quantised = [w for w in weights if w.lsb]
    if not quantised:
        return FLOAT_STEP
    square = sum(float(np.mean(np.square(w.steps))) * w.elements for w in quantised)
    return float(np.sqrt(square / sum(w.elements for w in quantised)))
