"""Weights with noise added, in a buffer of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgetrain.manifest import Manifest, WeightSpec, view
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.estimators.noise import NoiseKey, signs
from edgetrain.runtime.parameters import Parameters, Vector


class MovedWeights:
    """Moves a stage's weights along noise, and makes gradients of what that did.

    Noise is drawn again whenever it is needed, one weight at a time, so that none of it is
    kept. The weights themselves are not touched: to add and subtract again would leave
    rounding behind.

    Source: Malladi et al., Fine-tuning language models with just forward passes (MeZO,
    arXiv:2305.17333), for drawing the noise again. Ours: the weights stay as they are.

    Attributes:
        buffer: the weights as they were last moved.
        estimated: those that noise is added to: all that train but those with an exact
            gradient.
    """

    def __init__(self, manifest: Manifest, parameters: Parameters, seed: int) -> None:
        exact = manifest.exact
        self.estimated: tuple[WeightSpec, ...] = tuple(
            weight
            for weight in manifest.weights
            if weight.trainable and weight.name not in exact
        )
        self.buffer: Vector = parameters.weights.copy()
        self._parameters = parameters
        self._seed = seed

    def move(self, tick: Tick, k: int, size: float) -> None:
        """Set the buffer to the weights and `size` times the noise number `k`."""
        np.copyto(self.buffer, self._parameters.weights)
        for weight in self.estimated:
            part = view(self.buffer, weight)
            part += np.float32(size) * self._noise(tick, k, weight)

    def mirror(self) -> None:
        """Set the buffer to as far on the other side of the weights, drawing nothing."""
        for weight in self.estimated:
            part = view(self.buffer, weight)
            np.subtract(2 * view(self._parameters.weights, weight), part, out=part)

    def contract(self, tick: Tick, slopes: npt.NDArray[Any]) -> None:
        """Write the gradient into the scratch buffer.

        Args:
            tick: the microbatch; the noise depends on it.
            slopes: of the loss along each noise.
        """
        for weight in self.estimated:
            part = view(self._parameters.scratch, weight)
            part[...] = 0
            for k, slope in enumerate(slopes):
                part += np.float32(slope / len(slopes)) * self._noise(tick, k, weight)

    def _noise(self, tick: Tick, k: int, weight: WeightSpec) -> Vector:
        key = NoiseKey(self._seed, tick.step, tick.microbatch, weight.layer, k)
        return signs(key, weight.shape)
