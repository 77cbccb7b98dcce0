"""A stage's weights and gradients: flat buffers, and the last few commits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from edgetrain.bundle import Bundle, GraphSpec, Manifest, Role, WeightSpec, view

Vector = npt.NDArray[np.float32]
# The commit just made, and the one whose loss is known to be finite.
COMMITS_KEPT: Final = 2
# Steps that a stage may be past the last stage's where nothing comes back to hold it.
RUN_AHEAD: Final = 2


def commits_kept(manifest: Manifest) -> int:
    """How many commits a stage keeps, for whoever fetches weights after a failure."""
    runs_ahead = not manifest.is_last and not manifest.cotangents_in
    return COMMITS_KEPT + (RUN_AHEAD if runs_ahead else 0)


class Parameters:
    """The weights of one stage.

    Attributes:
        weights: flat, trainable ones first, updated in place.
        gradient: flat, of the trainable ones; the sum over the microbatches so far.
        scratch: as `gradient`, of one microbatch: what graphs write to.
    """

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        self.weights: Vector = bundle.weights.copy()
        self.gradient: Vector = np.zeros(manifest.trainable_elements, np.float32)
        self.scratch: Vector = np.zeros(manifest.trainable_elements, np.float32)
        self._specs: dict[str, WeightSpec] = {spec.name: spec for spec in manifest.weights}
        self._statistics = manifest.statistics
        self._kept = commits_kept(manifest)
        self._commits: dict[int, Vector] = {-1: self.weights.copy()}

    @property
    def trainable(self) -> Vector:
        """The part of `weights` that the optimizer updates."""
        return self.weights[: self.gradient.size]

    def spec(self, name: str) -> WeightSpec:
        return self._specs[name]

    def held(self, graph: GraphSpec, weights: Vector | None = None) -> dict[str, Vector]:
        """The memory a graph reads its weights from and writes its gradients to.

        Args:
            graph: whose ports are looked up.
            weights: another flat buffer to read from, for perturbed weights.
        """
        source = self.weights if weights is None else weights
        held = {p.name: view(source, self._specs[p.key]) for p in graph.ports(Role.WEIGHT)}
        for port in graph.ports(Role.GRADIENT):
            held[port.name] = view(self.scratch, self._specs[port.key])
        return held

    def begin_step(self) -> None:
        self.gradient[...] = 0

    def accumulate(self) -> None:
        """Add the microbatch's gradient to the step's."""
        np.add(self.gradient, self.scratch, out=self.gradient)

    def absorb_statistics(self, batch: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Move the running statistics towards a microbatch's, keyed by the running name."""
        for statistic in self._statistics:
            unbiased = statistic.count / max(1, statistic.count - 1)
            for name, scale in ((statistic.mean, 1.0), (statistic.variance, unbiased)):
                running = view(self.weights, self._specs[name])
                running *= np.float32(statistic.momentum)
                running += np.float32((1 - statistic.momentum) * scale) * batch[name]

    def commit(self, step: int) -> None:
        """Keep a copy of the weights as they are after `step`."""
        stale = self._commits.pop(step - self._kept, None)
        copy = np.empty_like(self.weights) if stale is None else stale
        np.copyto(copy, self.weights)
        self._commits[step] = copy

    def committed(self, step: int) -> Vector | None:
        """The weights after `step` (-1: as deployed); None when no longer kept."""
        return self._commits.get(step)
