"""Stochastic gradient descent on one flat buffer."""

from __future__ import annotations

import numpy as np

from edgetrain.runtime.optim.flat import BLOCK, Buffer, State, blocks, restore


class SGD:
    """SGD with momentum, Nesterov momentum and L2 weight decay.

    With velocity v, gradient g and weights w: g += weight_decay * w; v = momentum * v + g;
    w -= lr * v, or lr * (g + momentum * v) with Nesterov.

    Source: torch.optim.SGD with dampening 0, whose results it gives to rounding.
    """

    def __init__(
        self,
        elements: int,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        self._blocks = blocks(elements)
        self._momentum = np.float32(momentum)
        self._nesterov = nesterov
        self._weight_decay = np.float32(weight_decay)
        self._velocity = np.zeros(elements if momentum else 0, np.float32)
        self._scratch = np.empty(min(BLOCK, elements), np.float32)

    def step(
        self, weights: Buffer, gradient: Buffer, lr: float, before: Buffer | None = None
    ) -> None:
        """See `Optimizer.step`."""
        # a run that diverges is told so by its loss
        with np.errstate(over="ignore", invalid="ignore"):
            for block in self._blocks:
                if before is not None:
                    before[block] = weights[block]
                self._step(weights[block], gradient[block], lr, self._velocity[block])

    def _step(self, w: Buffer, gradient: Buffer, lr: float, v: Buffer) -> None:
        """Update one block; `gradient` is left as it is."""
        scratch = self._scratch[: w.size]
        if self._weight_decay:
            np.multiply(w, self._weight_decay, out=scratch)
            scratch += gradient
            gradient = scratch
        if not self._momentum:
            np.multiply(gradient, np.float32(lr), out=scratch)
            w -= scratch
            return
        v *= self._momentum
        v += gradient
        if self._nesterov:
            np.multiply(gradient, np.float32(lr), out=scratch)
            w -= scratch
            np.multiply(v, np.float32(lr * float(self._momentum)), out=scratch)
        else:
            np.multiply(v, np.float32(lr), out=scratch)
        w -= scratch

    def state(self) -> State:
        return {"velocity": self._velocity.copy()} if self._momentum else {}

    def load(self, state: State) -> None:
        restore({"velocity": self._velocity} if self._momentum else {}, state)
