"""A stage's weights and gradients: flat buffers, and the last few commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from edgetrain.bundle import Bundle
from edgetrain.manifest import GraphSpec, Manifest, Role, WeightSpec, view

Vector = npt.NDArray[np.float32]
# The commit just made, and the one whose loss is known to be finite.
COMMITS_KEPT: Final = 2
# Steps that a stage may be past the last stage's where nothing comes back to hold it.
RUN_AHEAD: Final = 2


def commits_kept(manifest: Manifest) -> int:
    """How many commits a stage keeps, for whoever fetches weights after a failure."""
    nothing_returns = not manifest.cotangents_in and not manifest.rays.slopes_in
    runs_ahead = not manifest.is_last and nothing_returns
    return COMMITS_KEPT + (RUN_AHEAD if runs_ahead else 0)


class Parameters:
    """The weights of one stage.

    The last commit is the weights themselves. An earlier one is the copy that the
    optimizer makes of a block while it has it in the cache; only running statistics, which
    move before the update, are copied apart.

    Attributes:
        weights: flat, trainable ones first, updated in place.
        gradient: flat, of the trainable ones; the sum over the microbatches so far.
        scratch: as `gradient`, of one microbatch.
        noted: is told of each microbatch's gradient that is added up.
    """

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        self.weights: Vector = bundle.weights.copy()
        self.gradient: Vector = np.zeros(manifest.trainable_elements, np.float32)
        self.scratch: Vector = np.zeros(manifest.trainable_elements, np.float32)
        self.noted: Callable[[Vector], None] = lambda _: None
        self._specs: dict[str, WeightSpec] = {spec.name: spec for spec in manifest.weights}
        self._statistics = manifest.statistics
        self._kept = commits_kept(manifest)
        self._last = bundle.first_step - 1
        self._earlier: dict[int, Vector] = {}
        self._committed_state = self._state.copy()
        self._fresh = True

    @property
    def nbytes(self) -> int:
        """Of all its buffers, those of the commits included."""
        buffers = (self.weights, self.gradient, self.scratch, self._committed_state)
        return sum(b.nbytes for b in (*buffers, *self._earlier.values()))

    @property
    def trainable(self) -> Vector:
        """The part of `weights` that the optimizer updates."""
        return self.weights[: self.gradient.size]

    @property
    def last(self) -> int:
        """The step of the last commit."""
        return self._last

    def spec(self, name: str) -> WeightSpec:
        return self._specs[name]

    def held(
        self,
        graph: GraphSpec,
        weights: Vector | None = None,
        gradient: Vector | None = None,
    ) -> dict[str, Vector]:
        """The memory a graph reads its weights from and writes its gradients to.

        Args:
            graph: whose ports are looked up.
            weights: another flat buffer to read from, for perturbed weights.
            gradient: the flat buffer to write to; `scratch` unless given.
        """
        source = self.weights if weights is None else weights
        target = self.scratch if gradient is None else gradient
        held = {p.name: view(source, self._specs[p.key]) for p in graph.ports(Role.WEIGHT)}
        for port in graph.ports(Role.GRADIENT):
            held[port.name] = view(target, self._specs[port.key])
        return held

    def begin_step(self) -> None:
        """The next microbatch's gradient replaces what `gradient` holds."""
        self._fresh = True

    def take_first(self) -> bool:
        """Whether this is the step's first microbatch, whose gradient needs no sum."""
        fresh, self._fresh = self._fresh, False
        return fresh

    def accumulate(self) -> None:
        """Add the scratch buffer to the step's gradient."""
        np.add(self.gradient, self.scratch, out=self.gradient)
        self.noted(self.scratch)

    def absorb_statistics(self, batch: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Move the running statistics towards a microbatch's, keyed by the running name."""
        for statistic in self._statistics:
            unbiased = statistic.count / max(1, statistic.count - 1)
            for name, scale in ((statistic.mean, 1.0), (statistic.variance, unbiased)):
                running = view(self.weights, self._specs[name])
                running *= np.float32(statistic.momentum)
                running += np.float32((1 - statistic.momentum) * scale) * batch[name]

    def open_commit(self) -> Vector:
        """Where the optimizer puts the trainable weights as they are before its update."""
        stale = self._earlier.pop(self._last - self._kept + 1, None)
        before = np.empty_like(self.weights) if stale is None else stale
        before[self.gradient.size :] = self._committed_state
        self._earlier[self._last] = before
        return before[: self.gradient.size]

    def close_commit(self, step: int) -> None:
        """The weights are now those after `step`."""
        self._last = step
        self._committed_state[...] = self._state

    def committed(self, step: int) -> Vector | None:
        """A copy of the weights after a step; None when not kept.

        Those after the step before the first one are the weights as deployed.
        """
        if step == self._last:
            copy = self.weights.copy()
            copy[self.gradient.size :] = self._committed_state
            return copy
        earlier = self._earlier.get(step)
        return None if earlier is None else earlier.copy()

    @property
    def _state(self) -> Vector:
        """The part of `weights` that no optimizer updates."""
        return self.weights[self.gradient.size :]
