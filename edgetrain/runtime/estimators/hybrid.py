"""Gradients from noise and its effect at the stage's end, where an exact cotangent is."""

from __future__ import annotations

from typing import Final

import numpy as np

from edgetrain.bundle import Bundle
from edgetrain.estimator_spec import ACTIVATIONS, MOST_ADAPTED
from edgetrain.manifest import GraphName
from edgetrain.runtime.engines.base import Engine
from edgetrain.runtime.estimators.activity import Activity
from edgetrain.runtime.estimators.base import Arrays, Backward, Tick
from edgetrain.runtime.estimators.segmented import Segmented
from edgetrain.runtime.estimators.weight_noise import WeightNoise
from edgetrain.runtime.parameters import Parameters

EVERY: Final = 50  # steps
NOISE: Final = 0.01  # signal to noise, below which estimates say next to nothing
CLEAR: Final = 0.2


class Hybrid(Segmented):
    """Mode ``hybrid``: exact from the last linear layer on, estimated before it.

    With c the cotangent that arrives, the last linear layer and what follows it get their
    exact gradient. The layers before it are perturbed, all at once, and c weighs what that
    does at the stage's end: see `Activity`, or `WeightNoise` where weights are perturbed.
    The cotangent for upstream is estimated alike.

    BatchNormalization uses its running statistics here, so samples are independent.

    Source: for cutting the contraction short at an exact cotangent, HOSL
    (arXiv:2601.10940). Ours: the exact last linear layer, and the estimated cotangent for
    upstream.
    """

    def __init__(
        self, bundle: Bundle, engine: Engine, parameters: Parameters, seed: int
    ) -> None:
        super().__init__(bundle, engine, parameters)
        self._estimate: Activity | WeightNoise
        if self._manifest.estimator.noise == ACTIVATIONS:
            self._estimate = Activity(self._manifest, self._segments, seed)
        else:
            forward = self._graphs[GraphName.FORWARD]
            self._estimate = WeightNoise(
                self._manifest, self._segments, forward, parameters, seed
            )

    def backward(self, tick: Tick, arriving: Arrays) -> Backward:
        """See `Estimator.backward`."""
        stash = self._stash.pop(tick)
        losses, arriving = self._arrived(stash, arriving)
        own = self._own(arriving)
        upstream: Arrays = {}
        if own:
            upstream = self._estimate(tick, stash, own)
        self._parameters.accumulate()
        return Backward(self._upstream(arriving, stash, upstream), losses)

    @property
    def tangents(self) -> int:
        """Random directions a microbatch, at present."""
        return self._estimate.tangents

    def heed(self, signal: float, step: int) -> None:
        """Take more tangents or fewer, where that is asked for, every `EVERY` steps.

        Args:
            signal: to noise of the estimates, running over the steps.
            step: just done, from 0.

        Source: after FwdLLM (arXiv:2308.13894), which adds perturbations until the
        variance is low enough. Ours: by the agreement of microbatches.
        """
        unknown = signal == 0.0  # as with one microbatch a step
        if unknown or not self._manifest.estimator.adaptive or (step + 1) % EVERY:
            return
        if signal < NOISE:
            self._estimate.tangents = min(2 * self.tangents, MOST_ADAPTED)
        elif signal > CLEAR:
            self._estimate.tangents = max(self.tangents // 2, 1)

    def forget(self) -> None:
        """See `Estimator.forget`."""
        super().forget()
        self._estimate.forget()

    def _upstream(self, arriving: Arrays, stash: Arrays, estimated: Arrays) -> Arrays:
        """What passes through, and what was estimated; nothing arriving counts as 0."""
        found = {}
        for name in self._manifest.cotangents_out:
            parts = [part[name] for part in (arriving, estimated) if name in part]
            found[name] = sum(parts[1:], parts[0]) if parts else np.zeros_like(stash[name])
        return found
