"""Estimates from noise at the outputs of linear layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from edgetrain.estimator_spec import JVP
from edgetrain.manifest import Manifest, Mode, Role
from edgetrain.runtime.estimators.base import Arrays, Tick
from edgetrain.runtime.estimators.cone import felt
from edgetrain.runtime.estimators.control_variate import (
    ControlVariate,
    elements_of,
    rows_of,
)
from edgetrain.runtime.estimators.noise import NoiseKey, signs
from edgetrain.runtime.estimators.segments import Noise, Seen, Segments, masked
from edgetrain.segment import Unit

Array = npt.NDArray[np.float32]

STEP: Final = 1e-3
UPSTREAM_LAYER: Final = 1 << 20  # noise of activations, apart from that of any layer


@dataclass
class Draw:
    """One draw of noise, and what came of it.

    Attributes:
        tangents: at the stage's end, by value.
        explained: [samples], of each slope what the guesses account for.
        predicted: [samples, rows], of the tangents what the feedback weights account for.
    """

    tangents: Arrays
    explained: Array
    predicted: Array


class Activity:
    """Activity-perturbed gradients of the layers before a stage's exact end.

    With noise v, each element 1 or -1, at the output z of each layer, t the tangent that it
    causes at the stage's end and c the cotangent there, every sample b has a slope s_b =
    <c_b, t_b>, and s_b v_b is an unbiased estimate of the cotangent of z_b: E[v v'] = 1,
    and the layers' noise is independent. The weights' gradient is its contraction with the
    layer's input. Noise is not used where the rectifier after z passes nothing. The tangent
    is exact (form ``"jvp"``), or a central difference of two forwards (``"forward"``).

    Two things make it less noisy: a layer whose places are felt within a cone at the
    stage's end uses the slope of that cone alone; and dense layers have a learned
    `ControlVariate`.

    Source: Ren et al., Scaling forward gradient with local losses (arXiv:2210.03310), for
    the perturbation of activities; Baydin et al. (arXiv:2202.08587) for forward gradients.
    Ours: the cones, and the control variate as used here.
    """

    def __init__(self, manifest: Manifest, segments: Segments, seed: int) -> None:
        self._manifest = manifest
        self._segments = segments
        self._seed = seed
        self._spec = manifest.estimator
        self.tangents = manifest.estimator.tangents
        self._inputs = _noisy_inputs(manifest)
        noisy = (*segments.units, *self._inputs)
        self._samples = 0  # that are independent; known when cotangents are
        self._noisy = noisy
        self._variate: ControlVariate | None = None

    def __call__(self, tick: Tick, stash: Arrays, cotangents: Arrays) -> Arrays:
        """Write the microbatch's gradients, into the scratch buffer.

        Args:
            tick: the microbatch; the noise depends on it.
            stash: what the stage received.
            cotangents: of the stage's end.

        Returns:
            Estimated cotangents of what was received, where they are wanted.
        """
        self._samples = self._samples or self._independent(cotangents.values())
        source = rows_of(cotangents.values(), self._samples)
        draws = [
            self._draw(tick, k, stash, cotangents, source)
            for k in range(self.tangents if self._noisy else 0)
        ]

        def cotangent(unit: Unit) -> Array:
            drawn = self._redrawn(tick, unit, len(draws))
            return self._estimate(unit, drawn, draws, cotangents, source)

        def learn(unit: Unit, values: Arrays) -> None:
            if self._variate is not None and unit.name in self._variate:
                drawn = self._redrawn(tick, unit, len(draws))
                rows = (self._rows(masked(unit, values, v)) for v in drawn)
                self._learn(self._variate, unit, rows, draws, cotangents)

        self._segments.contract(stash, cotangent, cotangents, learn)
        found = {unit.name: cotangent(unit) for unit in self._inputs}
        for unit in self._inputs:
            learn(unit, {})
        return found

    def forget(self) -> None:
        """Drop what the control variate has learned."""
        self._variate = None
        self.tangents = self._spec.tangents

    def _independent(self, cotangents: Iterable[Array]) -> int:
        """The microbatch's samples, if all tensors begin with them; else there is one."""
        samples = self._manifest.microbatch
        shapes = [u.shape for u in self._noisy] + [c.shape for c in cotangents]
        return samples if all(shape[:1] == (samples,) for shape in shapes) else 1

    def _draw(
        self, tick: Tick, k: int, stash: Arrays, cotangents: Arrays, source: Array
    ) -> Draw:
        """Push one draw of noise through the stage."""
        variate = self._variate_for(source)
        draw = Draw({}, np.zeros(self._samples, np.float32), np.zeros_like(source))

        def noise(unit: Unit) -> Array:
            return self._noise(tick, unit, k)

        def account(unit: Unit, values: Arrays) -> None:
            if variate is not None and unit.name in variate:
                rows = self._rows(masked(unit, values, noise(unit)))
                draw.explained += (variate.guess(unit.name, source) * rows).sum(axis=1)
                draw.predicted += variate.predicted(unit.name, rows)

        upstream = {unit.name: noise(unit) for unit in self._inputs}
        for unit in self._inputs:
            account(unit, {})
        if self._spec.form == JVP:
            draw.tangents = self._segments.push(stash, noise, upstream, account).tangents
        else:
            draw.tangents = self._difference(stash, upstream, noise, account, cotangents)
        return draw

    def _difference(
        self,
        stash: Arrays,
        upstream: Arrays,
        noise: Noise,
        account: Seen,
        ends: Arrays,
    ) -> Arrays:
        """The tangents as central differences of plain forwards."""

        def still(unit: Unit) -> Array:
            return np.zeros_like(noise(unit))

        self._segments.push(stash, still, {}, account)
        ahead, behind = (
            self._moved(stash, upstream, noise, size) for size in (STEP, -STEP)
        )
        return {name: (ahead[name] - behind[name]) / np.float32(2 * STEP) for name in ends}

    def _moved(self, stash: Arrays, upstream: Arrays, noise: Noise, size: float) -> Arrays:
        """What the stage makes with so much of the noise added."""
        values = {
            n: x + np.float32(size) * upstream[n] if n in upstream else x
            for n, x in stash.items()
        }

        def shifted(unit: Unit) -> Array:
            moved = noise(unit)
            moved *= np.float32(size)
            return moved

        return self._segments.push(values, shifted, {}).values

    def _estimate(
        self,
        unit: Unit,
        noise: Iterable[Array],
        draws: Sequence[Draw],
        cotangents: Arrays,
        source: Array,
    ) -> Array:
        """The estimated cotangent of what a unit makes."""
        total = np.zeros(unit.shape, np.float32)
        variate = self._variate_for(source)
        guessed = variate is not None and unit.name in variate
        for v, draw in zip(noise, draws, strict=True):
            slope = [
                c * draw.tangents[n] for n, c in cotangents.items() if n in draw.tangents
            ]
            if unit.cone and not guessed and len(slope) == 1 and self._samples > 1:
                v *= felt(unit, slope[0])
                total += v
                continue
            parts = [s.reshape(self._samples, -1).sum(axis=1) for s in slope]
            scalar = sum(parts, np.zeros(self._samples, np.float32)) - draw.explained
            rows = self._rows(v)
            rows *= scalar[:, None]
            total += v
        total /= np.float32(len(draws))
        if variate is not None and guessed:
            total += variate.guess(unit.name, source).reshape(unit.shape)
        return total

    def _learn(
        self,
        variate: ControlVariate,
        unit: Unit,
        noise: Iterable[Array],
        draws: Sequence[Draw],
        cotangents: Arrays,
    ) -> None:
        """Improve the unit's guess by what the noise did."""
        errors = []
        for draw in draws:
            ends = [draw.tangents.get(n, np.zeros_like(c)) for n, c in cotangents.items()]
            errors.append(rows_of(ends, self._samples) - draw.predicted)
        pairs = zip(errors, noise, strict=True)
        variate.learn(unit.name, pairs, self._samples * len(draws))

    def _variate_for(self, source: Array) -> ControlVariate | None:
        if self._variate is None and self._spec.control_variate and self._samples > 1:
            sizes = {unit.name: elements_of(unit.shape) for unit in self._noisy}
            layers = {u.name: sizes[u.name] for u in self._noisy if not u.cone}
            self._variate = ControlVariate(layers, source.shape[1], sum(sizes.values()))
        return self._variate

    def _rows(self, array: Array) -> Array:
        return array.reshape(self._samples, -1)

    def _redrawn(self, tick: Tick, unit: Unit, draws: int) -> Iterator[Array]:
        """The noise of each draw in turn, none of it kept."""
        for k in range(draws):
            noise = self._noise(tick, unit, k)
            self._segments.note(noise)
            yield noise

    def _noise(self, tick: Tick, unit: Unit, k: int) -> Array:
        key = NoiseKey(self._seed, tick.step, tick.microbatch, unit.layer, k)
        return signs(key, unit.shape)


def _noisy_inputs(manifest: Manifest) -> tuple[Unit, ...]:
    """The received activations whose cotangents are to be estimated."""
    if manifest.mode is Mode.LOCAL:
        return ()
    read = {
        port.key
        for segment in manifest.segments
        if segment.push
        for port in manifest.graphs[segment.push].inputs
        if port.role in (Role.ACTIVATION, Role.TANGENT)
    }
    first = UPSTREAM_LAYER * (1 + manifest.stage)
    return tuple(
        Unit(spec.name, spec.dtype, spec.shape, layer=first + index)
        for index, spec in enumerate(manifest.receives)
        if spec.name in manifest.cotangents_out and spec.name in read
    )
