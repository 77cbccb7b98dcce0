"""Adam and AdamW on one flat buffer."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from edgetrain.runtime.optim.flat import BLOCK, Buffer, State, blocks, restore


class Adam:
    """Adam with L2 weight decay: the decay is part of the gradient.

    Moments and weights are float32; the bias corrections are float64 scalars.

    Source: Kingma and Ba, ICLR 2015, in the form of torch.optim.Adam, whose results it
    gives to rounding.
    """

    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        elements: int,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self._blocks = blocks(elements)
        self._betas = betas
        self._eps = np.float32(eps)
        self._weight_decay = weight_decay
        self._steps = np.zeros((), np.int64)
        self._mean = np.zeros(elements, np.float32)
        self._square = np.zeros(elements, np.float32)
        self._scratch = np.empty((2, min(BLOCK, elements)), np.float32)

    def step(
        self, weights: Buffer, gradient: Buffer, lr: float, before: Buffer | None = None
    ) -> None:
        """See `Optimizer.step`."""
        self._steps += 1
        steps = int(self._steps)
        step_size = np.float32(lr / (1.0 - self._betas[0] ** steps))
        root = np.float32(math.sqrt(1.0 - self._betas[1] ** steps))
        # a run that diverges is told so by its loss
        with np.errstate(over="ignore", invalid="ignore"):
            for block in self._blocks:
                w, m, v = weights[block], self._mean[block], self._square[block]
                if before is not None:
                    before[block] = w
                self._moments(m, v, self._decay(w, gradient[block], lr))
                scratch = self._scratch[0, : w.size]
                np.sqrt(v, out=scratch)
                scratch /= root
                scratch += self._eps
                np.divide(m, scratch, out=scratch)
                scratch *= step_size
                w -= scratch

    def _decay(self, w: Buffer, g: Buffer, lr: float) -> Buffer:
        """Apply the weight decay; return the gradient to use."""
        if not self._weight_decay:
            return g
        if self.decoupled:
            w *= np.float32(1.0 - lr * self._weight_decay)
            return g
        decayed = self._scratch[1, : w.size]
        np.multiply(w, np.float32(self._weight_decay), out=decayed)
        decayed += g
        return decayed

    def _moments(self, m: Buffer, v: Buffer, g: Buffer) -> None:
        beta1, beta2 = self._betas
        scratch = self._scratch[0, : g.size]
        np.subtract(g, m, out=scratch)
        scratch *= np.float32(1.0 - beta1)
        m += scratch
        np.multiply(g, g, out=scratch)
        scratch *= np.float32(1.0 - beta2)
        v *= np.float32(beta2)
        v += scratch

    def state(self) -> State:
        return {name: array.copy() for name, array in self._state().items()}

    def load(self, state: State) -> None:
        restore(self._state(), state)

    def _state(self) -> State:
        return {"mean": self._mean, "square": self._square, "steps": self._steps}


class AdamW(Adam):
    """Adam with decoupled weight decay: the weights shrink by lr * weight_decay a step.

    Source: Loshchilov and Hutter, ICLR 2019, in the form of torch.optim.AdamW.
    """

    decoupled = True
