"""Estimates from noise in the weights themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgetrain.manifest import GraphName, Manifest, Mode, Role, Unit, view
from edgetrain.runtime.engines.base import LoadedGraph
from edgetrain.runtime.estimators.base import Arrays, Tick
from edgetrain.runtime.estimators.noise import NoiseKey, normal
from edgetrain.runtime.estimators.segments import Segments
from edgetrain.runtime.parameters import Parameters

Array = npt.NDArray[Any]

WEIGHT_STEP: Final = 1e-3
ACTIVATION_STEP: Final = 1e-2  # times the activation's root mean square
SMALLEST: Final = 1e-30
UPSTREAM_LAYER: Final = 1 << 16  # noise of activations, apart from that of any weight


class WeightNoise:
    """Weight-perturbed gradients, by central differences of plain forwards.

    With c the cotangent that arrives and f the stage, the gradient of the weights W is
    estimated a microbatch at a time along V ~ N(0, 1)::

        s = <c, f(x; W + eV) - f(x; W - eV)> / 2e        gradient = s V

    unbiased up to O(e^2), as E[V V'] = 1. Cotangents for upstream are estimated alike, with
    one scalar a sample::

        s_b = <c_b, f(x_b + eU_b) - f(x_b - eU_b)> / 2e        cotangent_b = s_b U_b

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
        self._parameters = parameters
        self._seed = seed
        self._tangents = manifest.estimator.tangents
        spec = manifest.graphs["forward"]
        self._moved_weights = parameters.weights.copy()
        self._moved = forward.holding(parameters.held(spec, self._moved_weights))
        self._inputs = [p.name for p in spec.inputs if p.role is Role.ACTIVATION]
        named = [s.contract for s in manifest.segments if s.exact and s.contract]
        named += [name for name in (GraphName.HEAD,) if name in manifest.graphs]
        exact = {
            port.key for n in named for port in manifest.graphs[n].ports(Role.GRADIENT)
        }
        self._estimated = {
            layer: weight
            for layer, weight in enumerate(manifest.weights)
            if weight.trainable and weight.name not in exact
        }

    def __call__(self, tick: Tick, stash: Arrays, cotangents: Arrays) -> Arrays:
        """See `Activity`."""
        self._segments.contract(stash, _nothing, cotangents)
        self._estimate_gradient(tick, stash, cotangents)
        return self._estimate_upstream(tick, stash, cotangents)

    def _estimate_gradient(self, tick: Tick, stash: Arrays, cotangents: Arrays) -> None:
        """One scalar a tangent for all estimated weights together."""
        for weight in self._estimated.values():
            view(self._parameters.scratch, weight)[...] = 0
        tangents = self._tangents if self._estimated else 0
        for k in range(tangents):
            noise = {
                layer: self._noise(tick, layer, k, weight.shape)
                for layer, weight in self._estimated.items()
            }

            def shifted(size: float, noise: Mapping[int, Array] = noise) -> Arrays:
                np.copyto(self._moved_weights, self._parameters.weights)
                for layer, weight in self._estimated.items():
                    part = view(self._moved_weights, weight)
                    part += np.float32(size) * noise[layer]
                return self._moved.run(stash)

            scalar = _slopes(shifted, WEIGHT_STEP, cotangents, 1).item() / tangents
            for layer, weight in self._estimated.items():
                part = view(self._parameters.scratch, weight)
                part += np.float32(scalar) * noise[layer]

    def _estimate_upstream(self, tick: Tick, stash: Arrays, own: Arrays) -> Arrays:
        """Cotangents of the received activations that the stage reads."""
        wanted = self._manifest.cotangents_out
        if self._manifest.mode is Mode.LOCAL:
            wanted = ()
        layers = {name: UPSTREAM_LAYER + i for i, name in enumerate(wanted)}
        found: dict[str, Array] = {}
        for name in (n for n in wanted if n in self._inputs):
            x = stash[name]
            samples = self._independent(x, *own.values())
            estimate = np.zeros_like(x)
            size = ACTIVATION_STEP * max(_root_mean_square(x), SMALLEST)
            for k in range(self._tangents):
                noise = self._noise(tick, layers[name], k, x.shape)

                def shifted(step: float, name: str = name, noise: Array = noise) -> Arrays:
                    moved = stash[name] + np.float32(step) * noise
                    return self._forward.run({**stash, name: moved})

                scalars = _slopes(shifted, size, own, samples) / self._tangents
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
        return normal(key, shape)


def _nothing(unit: Unit) -> Array:
    return np.zeros(unit.shape, unit.dtype)


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
