"""Estimates from noise in the weights themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgetrain.manifest import Manifest, Mode, Role
from edgetrain.runtime.engines.base import LoadedGraph
from edgetrain.runtime.estimators.base import Arrays, Tick
from edgetrain.runtime.estimators.moved_levels import MovedLevels
from edgetrain.runtime.estimators.moved_weights import MovedWeights
from edgetrain.runtime.estimators.noise import NoiseKey, signs
from edgetrain.runtime.estimators.segments import Segments, nothing
from edgetrain.runtime.parameters import Parameters

Array = npt.NDArray[Any]

WEIGHT_STEP: Final = 1e-3
ACTIVATION_STEP: Final = 1e-2  # times the activation's root mean square
# Where activations are rounded, what moves them by less than a step is mostly lost.
ROUNDED_ACTIVATION_STEP: Final = 1e-1
SMALLEST: Final = 1e-30
UPSTREAM_LAYER: Final = 1 << 20  # noise of activations, apart from that of any weight


class WeightNoise:
    """Weight-perturbed gradients, by central differences of plain forwards.

    With c the cotangent that arrives and f the stage, the gradient of the weights W is
    estimated a microbatch at a time along V, a random sign each::

        s = <c, f(x; W + eV) - f(x; W - eV)> / 2e        gradient = s V

    unbiased up to O(e^2), as E[V V'] = 1. Cotangents for upstream are estimated alike, with
    one scalar a sample::

        s_b = <c_b, f(x_b + eU_b) - f(x_b - eU_b)> / 2e        cotangent_b = s_b U_b

    Where the forward is quantised, weights move by whole steps: see `MovedLevels`.

    Far noisier than `Activity` where a layer has more weights than outputs.

    Source: Baydin et al., Gradients without backpropagation (arXiv:2202.08587). Ours: a
    fresh perturbation for every microbatch.
    """

    def __init__(
        self,
        manifest: Manifest,
        segments: Segments,
        forward: LoadedGraph,
        parameters: Parameters,
        seed: int,
    ) -> None:
        self._manifest = manifest
        self._segments = segments
        self._forward = forward
        self._seed = seed
        self.tangents = manifest.estimator.tangents
        spec = manifest.graphs["forward"]
        self._weights = MovedWeights(manifest, parameters, seed)
        self._step, self._activation_step = WEIGHT_STEP, ACTIVATION_STEP
        if manifest.quantised:
            self._weights = MovedLevels(manifest, parameters, seed)
            self._step, self._activation_step = 1.0, ROUNDED_ACTIVATION_STEP
        self._moved = forward.holding(parameters.held(spec, self._weights.buffer))
        self._inputs = [p.name for p in spec.inputs if p.role is Role.ACTIVATION]

    def __call__(self, tick: Tick, stash: Arrays, cotangents: Arrays) -> Arrays:
        """See `Activity`."""
        self._segments.contract(stash, nothing, cotangents)
        self._estimate_gradient(tick, stash, cotangents)
        return self._estimate_upstream(tick, stash, cotangents)

    def forget(self) -> None:
        """Begin again with as many tangents as were asked for."""
        self.tangents = self._manifest.estimator.tangents

    def _estimate_gradient(self, tick: Tick, stash: Arrays, cotangents: Arrays) -> None:
        """One scalar a tangent for all estimated weights together."""
        slopes = np.zeros(self.tangents if self._weights.estimated else 0)
        for k in range(len(slopes)):

            def shifted(size: float, k: int = k) -> Arrays:
                if size > 0:
                    self._weights.move(tick, k, size)
                else:
                    self._weights.mirror()
                return self._moved.run(stash)

            slopes[k] = _slopes(shifted, self._step, cotangents, 1).item()
        self._weights.contract(tick, slopes)

    def _estimate_upstream(self, tick: Tick, stash: Arrays, own: Arrays) -> Arrays:
        """Cotangents of the received activations that the stage reads."""
        wanted = self._manifest.cotangents_out
        if self._manifest.mode is Mode.LOCAL:
            wanted = ()
        first = UPSTREAM_LAYER * (1 + self._manifest.stage)
        layers = {name: first + index for index, name in enumerate(wanted)}
        found: dict[str, Array] = {}
        for name in (n for n in wanted if n in self._inputs):
            x = stash[name]
            samples = self._independent(x, *own.values())
            estimate = np.zeros_like(x)
            size = self._activation_step * max(_root_mean_square(x), SMALLEST)
            for k in range(self.tangents):
                noise = self._noise(tick, layers[name], k, x.shape)

                def shifted(step: float, name: str = name, noise: Array = noise) -> Arrays:
                    moved = stash[name] + np.float32(step) * noise
                    return self._forward.run({**stash, name: moved})

                scalars = _slopes(shifted, size, own, samples) / self.tangents
                rows = noise.reshape(samples, -1)
                estimate += (scalars.astype(x.dtype)[:, None] * rows).reshape(x.shape)
            found[name] = estimate
        return found

    def _independent(self, *arrays: Array) -> int:
        """How many groups of rows have nothing to do with each other.

        Those of a microbatch's samples, if all tensors begin with them; else there is one.
        """
        samples = self._manifest.microbatch
        return samples if all(a.shape[:1] == (samples,) for a in arrays) else 1

    def _noise(self, tick: Tick, layer: int, k: int, shape: tuple[int, ...]) -> Array:
        key = NoiseKey(self._seed, tick.step, tick.microbatch, layer, k)
        return signs(key, shape)


def _slopes(
    shifted: Callable[[float], Arrays], size: float, cotangents: Arrays, samples: int
) -> npt.NDArray[np.float64]:
    """<c, f(+size) - f(-size)> / 2 size, of each sample, in double precision."""
    plus, minus = shifted(size), shifted(-size)
    total = np.zeros(samples)
    for name, cotangent in cotangents.items():
        change = np.subtract(plus[name], minus[name], dtype=np.float64) * cotangent
        total += change.reshape(samples, -1).sum(axis=1)
    return total / (2 * size)


def _root_mean_square(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
