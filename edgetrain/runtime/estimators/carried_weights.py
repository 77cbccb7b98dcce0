"""Gradients from what noise in the weights does to the loss."""

from __future__ import annotations

import numpy as np

from edgetrain.bundle import Bundle
from edgetrain.manifest import GraphName, Role
from edgetrain.rays import SLOPES
from edgetrain.runtime.engines.base import Engine
from edgetrain.runtime.estimators.base import Arrays, Tick
from edgetrain.runtime.estimators.carried import Carried
from edgetrain.runtime.estimators.moved_weights import MovedWeights
from edgetrain.runtime.estimators.segments import nothing
from edgetrain.runtime.parameters import Parameters


class CarriedWeights(Carried):
    """Mode ``forward_gradient`` with noise in the weights, one draw a microbatch and k.

    With T what weights moved along signs V on all stages cause where the loss applies,
    and e the loss's cotangent there, s = <e, T> is one number a microbatch, and s V an
    unbiased estimate of the gradient. T is a difference of plain forwards.

    Source: Baydin et al., Gradients without backpropagation (arXiv:2202.08587). Ours: a
    fresh perturbation for every microbatch, and its variants handed from stage to stage.
    """

    def __init__(
        self, bundle: Bundle, engine: Engine, parameters: Parameters, seed: int
    ) -> None:
        super().__init__(bundle, engine, parameters, seed)
        self._weights = MovedWeights(self._manifest, parameters, seed)
        held = parameters.held(self._specs[GraphName.FORWARD], self._weights.buffer)
        self._shifted = self._graphs[GraphName.FORWARD].holding(held)

    def _carry(self, tick: Tick, index: int, values: Arrays, moved: Arrays) -> Arrays:
        k, size = self._shift(index)
        if size > 0:
            self._weights.move(tick, k, size)
        else:
            self._weights.mirror()
        return {**moved, **self._shifted.run({**values, **moved})}

    def _learn(self, tick: Tick, stash: Arrays, ends: Arrays, slopes: Arrays) -> Arrays:
        self._segments.contract(stash, nothing, ends)
        if SLOPES in slopes:
            found = slopes[SLOPES].sum(axis=1, keepdims=True)
            self._weights.contract(tick, found[:, 0])
            return {SLOPES: found}
        return {}


class Spsa(CarriedWeights):
    """Mode ``spsa``: as `CarriedWeights`, but of the loss itself.

    s = (L(W + cV) - L(W - cV)) / 2c, with L the microbatch's mean loss of the whole model.
    Plain forwards, a seed and one number are all that is needed, so it runs anywhere. It is
    as noisy as there are weights: for few of them. With one side, L(W) stands for the
    second loss.

    Source: Spall, Multivariate stochastic approximation using a simultaneous perturbation
    gradient approximation (IEEE TAC 37, 1992); Malladi et al. (MeZO, arXiv:2305.17333).
    Ours: the exact last linear layer, which is not perturbed; signs for noise, fresh for
    every microbatch; and weights that are not moved in place.
    """

    def _slopes(self, values: Arrays, _ends: Arrays) -> Arrays:
        ((name, ray),) = self._made.items()
        still = self._mean_loss(values)
        losses = [self._mean_loss({**values, name: v}) for v in values[ray.name]]
        slopes = self._differences(np.asarray(losses), np.asarray(still))
        return {SLOPES: slopes.astype(np.float32)[:, None]}

    def _mean_loss(self, values: Arrays) -> float:
        criterion = self._graphs[GraphName.CRITERION].run(values)
        (port,) = self._specs[GraphName.CRITERION].ports(Role.LOSS)
        return float(criterion[port.name].mean(dtype=np.float64))
