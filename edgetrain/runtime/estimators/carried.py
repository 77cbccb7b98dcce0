"""What the estimators share whose noise is carried on to the loss, stage by stage."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import numpy as np

from edgetrain.bundle import Bundle
from edgetrain.estimator_spec import JVP, WEIGHTS
from edgetrain.rays import ERROR, SLOPES, TANGENTS, independent, origin
from edgetrain.runtime.engines.base import Array, Engine
from edgetrain.runtime.estimators.base import Arrays, Backward, Tick
from edgetrain.runtime.estimators.segmented import Segmented
from edgetrain.runtime.parameters import Parameters

STEP: Final = 1e-2
WEIGHT_STEP: Final = 1e-3


class Carried(Segmented):
    """Adds its noise to the rays it receives, and learns from the slopes that come back.

    No cotangent comes back, so no later stage has to run a backward. See `edgetrain.rays`.
    """

    def __init__(
        self, bundle: Bundle, engine: Engine, parameters: Parameters, seed: int
    ) -> None:
        super().__init__(bundle, engine, parameters)
        rays = self._manifest.rays
        self._spec = self._manifest.estimator
        self._seed = seed
        self._received = {origin(ray): ray.name for ray in rays.received}
        self._made = {origin(ray): ray for ray in rays.made}
        self._step = WEIGHT_STEP if self._spec.noise == WEIGHTS else STEP

    @abstractmethod
    def _carry(self, tick: Tick, index: int, values: Arrays, moved: Arrays) -> Arrays:
        """One ray of the stage's end.

        Args:
            tick: the microbatch.
            index: of the ray.
            values: the activations received.
            moved: the ray of each of them that has one.
        """

    @abstractmethod
    def _learn(self, tick: Tick, stash: Arrays, ends: Arrays, slopes: Arrays) -> Arrays:
        """Write the gradient and return what goes upstream.

        Args:
            tick: the microbatch.
            stash: what was kept of it.
            ends: at the last stage, the cotangent of what the loss applies to.
            slopes: as the last stage found them, or as they came.
        """

    def forward(self, tick: Tick, activations: Arrays) -> Arrays:
        """See `Estimator.forward`."""
        made = {r.name: np.zeros(r.shape, r.dtype) for r in self._made.values()}
        for index in range(max(map(len, made.values()), default=0)):
            moved = {name: activations[ray][index] for name, ray in self._received.items()}
            ends = self._carry(tick, index, activations, moved)
            for name, ray in self._made.items():
                if name in ends:
                    made[ray.name][index] = ends[name]
        return super().forward(tick, {**activations, **made})

    def backward(self, tick: Tick, arriving: Arrays) -> Backward:
        """See `Estimator.backward`."""
        stash = self._stash.pop(tick)
        losses, ends, slopes = None, {}, arriving
        if self._manifest.is_last:
            losses, found = self._arrived(stash, arriving)
            ends = dict(found)
            slopes = self._slopes({**stash, **arriving}, ends) if self._made else {}
        self._begin()
        passed = self._learn(tick, stash, ends, slopes)
        self._parameters.accumulate()
        wanted = self._manifest.rays.slopes_out
        return Backward({spec.name: passed[spec.name] for spec in wanted}, losses)

    def _slopes(self, values: Arrays, _ends: Arrays) -> Arrays:
        """At the last stage: <e, t> of each tangent t, with e the loss's cotangent."""
        ((name, ray),) = self._made.items()
        tangents = self._tangents(values[ray.name], values[name])
        rows = independent(self._manifest.microbatch, _ends[name].shape)
        error = _ends[name].reshape(rows, -1)
        tangents = tangents.reshape(len(tangents), rows, -1)
        slopes = np.einsum("krc,rc->kr", tangents, error)
        return {SLOPES: slopes, ERROR: error, TANGENTS: tangents}

    def _tangents(self, rays: Array, still: Array) -> Array:
        """Tangents, if need be from differences, in single precision."""
        if self._spec.form == JVP:
            return rays
        return self._differences(rays, still).astype(np.float32)

    def _differences(self, rays: Array, still: Array) -> Array:
        """Of variants, or of anything made of each: its slopes along the noise."""
        each = self._spec.sides
        ahead, behind = rays[::each], rays[1::each] if each > 1 else still
        change = np.subtract(ahead, behind, dtype=np.float64)
        return np.asarray(change / (each * self._step))

    def _shift(self, index: int) -> tuple[int, float]:
        """The noise of a variant, and how far it is moved along it."""
        k, side = divmod(index, self._spec.sides)
        return k, -self._step if side else self._step
