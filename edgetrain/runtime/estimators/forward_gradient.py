"""Gradients of the loss from noise that is carried all the way to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgetrain.bundle import Bundle
from edgetrain.estimator_spec import JVP
from edgetrain.rays import ERROR, SLOPES, TANGENTS, independent, rows_of
from edgetrain.runtime.engines.base import Engine
from edgetrain.runtime.estimators.base import Arrays, Tick
from edgetrain.runtime.estimators.carried import Carried
from edgetrain.runtime.estimators.control_variate import ControlVariate, elements_of
from edgetrain.runtime.estimators.noise import NoiseKey, signs
from edgetrain.runtime.estimators.segments import masked, nothing
from edgetrain.runtime.parameters import Parameters
from edgetrain.segment import Unit

Array = npt.NDArray[np.float32]


class ForwardGradient(Carried):
    """Mode ``forward_gradient``: activities are perturbed, on every stage.

    Every stage adds noise v, each element 1 or -1, to the tangents at its layers' outputs.
    With t what all of it causes where the loss applies, and e the loss's cotangent there,
    each sample b has a slope s_b = <e_b, t_b>, and s_b v_b is an unbiased estimate of the
    cotangent of v_b, as the noise of all layers is independent. The model's last linear
    layer is exact, from e. Tangents are exact (form ``"jvp"``) or differences of forwards
    (``"forward"``).

    With a control variate, a stage guesses cotangents from e, subtracts from the slopes
    what its guesses account for, and sends the rest upstream: the stages before it then see
    less of its noise. See `ControlVariate`.

    Source: Ren et al., Scaling forward gradient with local losses (arXiv:2210.03310);
    Baydin et al., Gradients without backpropagation (arXiv:2202.08587). Ours: across
    stages, and the control variate.
    """

    def __init__(
        self, bundle: Bundle, engine: Engine, parameters: Parameters, seed: int
    ) -> None:
        super().__init__(bundle, engine, parameters, seed)
        units, manifest = self._segments.units, self._manifest
        shapes = [unit.shape for unit in units]
        self._samples = rows_of(manifest.rays, shapes, manifest.microbatch)
        self._variate: ControlVariate | None = None
        rows = self._rows_of_error()
        if units and rows and self._samples > 1 and self._spec.control_variate:
            sizes = {unit.name: elements_of(unit.shape) for unit in units}
            self._variate = ControlVariate(sizes, rows, sum(sizes.values()))

    def _rows_of_error(self) -> int:
        """Elements a sample of the loss's cotangent, where the stage gets to know it."""
        rays, samples = self._manifest.rays, self._manifest.microbatch
        if self._manifest.is_last:
            shapes = [ray.shape[1:] for ray in rays.made]
        else:
            shapes = [spec.shape for spec in rays.slopes_in if spec.name == ERROR]
        return sum(elements_of(s) for s in shapes if independent(samples, s) > 1)

    def _carry(self, tick: Tick, index: int, values: Arrays, moved: Arrays) -> Arrays:
        if self._spec.form == JVP:
            return self._segments.push(
                values, lambda unit: self._noise(tick, unit, index), moved
            ).tangents
        k, size = self._shift(index)

        def shifted(unit: Unit) -> Array:
            return np.float32(size) * self._noise(tick, unit, k)

        return self._segments.push({**values, **moved}, shifted, {}).values

    def _learn(self, tick: Tick, stash: Arrays, ends: Arrays, slopes: Arrays) -> Arrays:
        if self._variate is not None:
            slopes = self._unexplained(self._variate, tick, stash, ends, slopes)
        own = slopes.get(SLOPES, np.zeros((0, self._samples), np.float32))
        if own.shape[1] != self._samples:
            own = own.sum(axis=1, keepdims=True)
        noise: dict[str, list[Array]] = {}

        def cotangent(unit: Unit) -> Array:
            drawn = [self._noise(tick, unit, k) for k in range(len(own))]
            noise[unit.name] = drawn
            return self._estimate(unit, drawn, own, slopes)

        def learn(unit: Unit, values: Arrays) -> None:
            self._improve(unit, values, noise.pop(unit.name), slopes)

        self._segments.contract(stash, cotangent, ends, learn)
        return {**slopes, SLOPES: own}

    def _unexplained(
        self,
        variate: ControlVariate,
        tick: Tick,
        stash: Arrays,
        ends: Arrays,
        slopes: Arrays,
    ) -> Arrays:
        """What is left of slopes and tangents after what this stage's guesses predict.

        The error is known only now, and the noise that reaches it only from the values of
        rectifiers: where there are any, the stage is run once more.
        """
        left, tangents = slopes[SLOPES].copy(), slopes[TANGENTS].copy()
        error = slopes[ERROR]

        def account(unit: Unit, values: Arrays) -> None:
            if unit.name not in variate:
                return
            guess = variate.guess(unit.name, error)
            for k in range(len(left)):
                v = self._rows(masked(unit, values, self._noise(tick, unit, k)))
                left[k] -= (guess * v).sum(axis=1)
                tangents[k] -= variate.predicted(unit.name, v)

        units = [unit for unit in self._segments.units if unit.name in variate]
        if any(unit.mask for unit in units):
            self._segments.contract(stash, nothing, ends, account)
        else:
            for unit in units:
                account(unit, {})
        return {SLOPES: left, ERROR: error, TANGENTS: tangents}

    def _estimate(
        self, unit: Unit, noise: Sequence[Array], own: Array, slopes: Arrays
    ) -> Array:
        """The estimated cotangent of what a unit makes."""
        total = np.zeros(unit.shape, np.float32)
        for v, slope in zip(noise, own, strict=True):
            total += (slope[:, None] * self._rows(v)).reshape(unit.shape)
        total /= np.float32(max(1, len(noise)))
        if self._variate is not None and unit.name in self._variate:
            total += self._variate.guess(unit.name, slopes[ERROR]).reshape(unit.shape)
        return total

    def _improve(
        self, unit: Unit, values: Arrays, noise: Sequence[Array], slopes: Arrays
    ) -> None:
        """Improve the unit's guess by what the noise did."""
        if self._variate is None or unit.name not in self._variate:
            return
        rows = [self._rows(masked(unit, values, v)) for v in noise]
        pairs = zip(slopes[TANGENTS], rows, strict=True)
        self._variate.learn(unit.name, pairs, self._samples * len(rows))

    def _rows(self, array: Array) -> Array:
        return array.reshape(self._samples, -1)

    def _noise(self, tick: Tick, unit: Unit, k: int) -> Array:
        key = NoiseKey(self._seed, tick.step, tick.microbatch, unit.layer, k)
        return signs(key, unit.shape)
