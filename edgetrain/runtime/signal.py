"""How much of an estimated gradient is signal, told by the microbatches of a step."""

from __future__ import annotations

from typing import Final

from edgetrain.manifest import Manifest
from edgetrain.runtime.optim import flat
from edgetrain.runtime.parameters import Vector

DECAY: Final = 0.9  # of the running mean over steps
_NOISELESS: Final = frozenset(("vjp", "frozen", "identity", "local_vjp"))


class Signal:
    """Signal to noise of the estimated part of a stage's gradient.

    With g_m the estimates of a step's M microbatches, whose noise is independent::

        rho = mean over pairs of <g_m, g_m'> / mean of |g_m|^2
            = (|sum g_m|^2 - sum |g_m|^2) / ((M - 1) sum |g_m|^2)

    1 where all microbatches agree, 0 on average where each is noise alone. The differences
    between samples count as noise too.

    Attributes:
        mean: of rho, running over the steps; 0 before the first, and with one microbatch.

    Source: ours; the same sums as in the gradient noise scale of McCandlish et al., An
    empirical model of large-batch training (arXiv:1812.06162), appendix A.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.mean = 0.0
        exact = manifest.exact
        estimated = manifest.mode not in _NOISELESS
        self._parts = [
            slice(spec.offset, spec.offset + spec.elements)
            for spec in manifest.weights
            if estimated and spec.trainable and spec.name not in exact
        ]
        self._squares = 0.0
        self._microbatches = 0
        self._steps = 0

    def add(self, gradient: Vector) -> None:
        """Take in one microbatch's."""
        self._squares += self._square_sum(gradient)
        self._microbatches += 1

    def close(self, total: Vector) -> None:
        """End a step, given the sum over its microbatches."""
        squares, count = self._squares, self._microbatches
        self.forget()
        if count < 2 or not squares > 0:
            return
        rho = (self._square_sum(total) - squares) / ((count - 1) * squares)
        keep = DECAY if self._steps else 0.0
        self.mean = keep * self.mean + (1 - keep) * rho
        self._steps += 1

    def forget(self) -> None:
        """Drop the microbatches since the last step."""
        self._squares, self._microbatches = 0.0, 0

    def _square_sum(self, gradient: Vector) -> float:
        return sum(flat.square_sum(gradient[part]) for part in self._parts)
