"""Every optimizer, by the name a run file uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from edgetrain.optimizer_spec import OptimizerSpec
from edgetrain.runtime.optim.adam import Adam, AdamW
from edgetrain.runtime.optim.flat import Buffer, State
from edgetrain.runtime.optim.sgd import SGD


class Optimizer(Protocol):
    """Updates flat float32 weights in place; allocates nothing but its state."""

    def step(
        self, weights: Buffer, gradient: Buffer, lr: float, before: Buffer | None = None
    ) -> None:
        """Update `weights`.

        Args:
            weights: flat, updated in place.
            gradient: of the same length, left as it is.
            lr: the learning rate.
            before: gets a copy of the weights as they were.
        """

    def state(self) -> State:
        """A copy of what a later run needs to go on exactly as this one would."""

    def load(self, state: State) -> None:
        """Go on from a state.

        Raises:
            ConfigError: it is of another optimizer or of another size.
        """


def make(spec: OptimizerSpec, elements: int) -> Optimizer:
    """The optimizer for a buffer of so many trainable elements.

    Raises:
        ConfigError: the spec names no optimizer or holds a value out of range.
    """
    spec.check()
    return OPTIMIZERS[spec.name](spec, elements)


def _sgd(spec: OptimizerSpec, elements: int) -> Optimizer:
    return SGD(
        elements,
        momentum=spec.momentum,
        nesterov=spec.nesterov,
        weight_decay=spec.weight_decay,
    )


def _adam(spec: OptimizerSpec, elements: int) -> Optimizer:
    betas = (spec.beta1, spec.beta2)
    return Adam(elements, betas=betas, eps=spec.eps, weight_decay=spec.weight_decay)


def _adamw(spec: OptimizerSpec, elements: int) -> Optimizer:
    betas = (spec.beta1, spec.beta2)
    return AdamW(elements, betas=betas, eps=spec.eps, weight_decay=spec.weight_decay)


OPTIMIZERS: Final[Mapping[str, Callable[[OptimizerSpec, int], Optimizer]]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
}
