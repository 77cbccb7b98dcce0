"""A learned linear guess of the gradients, which takes most of the noise out of estimates.

With noise v and its slope s = <g, v>, the estimate s v of g is unbiased and as noisy as g
has elements. With any guess u that does not depend on v, u + (s - <u, v>) v is unbiased
too, and only as noisy as g - u is large. The guess is u = q F, with q the cotangent at the
stage's end and F learned from what the noise does there: it comes to be the stage's
transposed Jacobian, averaged over samples.

Source: control variates for node perturbation, after Lansdell et al., Learning to solve
the credit assignment problem (arXiv:1906.00889), where feedback weights are learned from
perturbations; used here as an exact control variate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

RATE: Final = 0.3
# Of a layer's feedback weights: more would cost more than the forward itself.
MAX_ELEMENTS: Final = 1 << 18


class ControlVariate:
    """The feedback weights of one stage.

    Args:
        layers: name of each noisy value and its elements a sample.
        rows: elements a sample of the cotangent that the guesses are made from.
        noisy: elements a sample of all noisy values together, those without a guess too.
    """

    def __init__(self, layers: Mapping[str, int], rows: int, noisy: int) -> None:
        self.feedback: dict[str, Array] = {
            name: np.zeros((rows, elements), np.float32)
            for name, elements in layers.items()
            if rows * elements <= MAX_ELEMENTS
        }
        self._noisy = noisy

    def __contains__(self, name: str) -> bool:
        return name in self.feedback

    def guess(self, name: str, source: Array) -> Array:
        """u [N, elements] from the cotangents q [N, rows]."""
        return source @ self.feedback[name]

    def predicted(self, name: str, noise: Array) -> Array:
        """What noise [N, elements] does at the stage's end, as the feedback has it."""
        return noise @ self.feedback[name].T

    def learn(self, name: str, pairs: Iterable[tuple[Array, Array]], draws: int) -> None:
        """Normalised least mean squares on what was predicted wrongly.

        Args:
            name: of the layer.
            pairs: of each draw the error [N, rows] and the noise [N, elements].
            draws: samples times draws.
        """
        step = RATE / (1 + self._noisy / draws) / draws
        for error, noise in pairs:
            self.feedback[name] += np.float32(step) * (error.T @ noise)


def rows_of(arrays: Iterable[npt.NDArray[np.float32]], samples: int) -> Array:
    """Several arrays of the same samples as one [N, elements]."""
    flat = [np.asarray(a, np.float32).reshape(samples, -1) for a in arrays]
    return flat[0] if len(flat) == 1 else np.concatenate(flat, axis=1)


def elements_of(shape: tuple[int, ...]) -> int:
    """Of one sample."""
    return math.prod(shape[1:])
