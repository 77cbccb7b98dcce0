"""What all estimators share that never run a backward graph of their stage."""

from __future__ import annotations

from typing import Final

from edgetrain.bundle import Bundle
from edgetrain.manifest import GraphName, Role
from edgetrain.runtime.engines.base import Array, Engine, LoadedGraph
from edgetrain.runtime.estimators.base import Arrays, Tick
from edgetrain.runtime.estimators.segments import Segments, ends_of
from edgetrain.runtime.parameters import Parameters

OWN_LOSSES: Final = (GraphName.CRITERION, GraphName.HEAD)


class Segmented:
    """Runs the plain forward, and keeps of a microbatch what it received.

    Where the cotangent of its end is its own, from the loss or from a head, it keeps what
    these apply to as well. When the microbatch comes back, the stage is run again, segment
    by segment.
    """

    def __init__(self, bundle: Bundle, engine: Engine, parameters: Parameters) -> None:
        self._manifest = bundle.manifest
        self._parameters = parameters
        self._specs = bundle.manifest.graphs
        self._graphs: dict[str, LoadedGraph] = {
            name: engine.load(
                bundle.graphs[name], self._specs[name], parameters.held(self._specs[name])
            )
            for name in (GraphName.FORWARD, GraphName.CRITERION, GraphName.HEAD)
            if name in self._specs
        }
        self._segments = Segments(bundle, engine, parameters)
        self._kept = tuple(spec.name for spec in self._manifest.stashed)
        self._stash: dict[Tick, dict[str, Array]] = {}

    def forward(self, tick: Tick, activations: Arrays) -> Arrays:
        """See `Estimator.forward`."""
        results: Arrays = {}
        if GraphName.FORWARD in self._graphs:
            results = self._graphs[GraphName.FORWARD].run(activations)
        values = {**activations, **results}
        self._stash[tick] = {name: values[name] for name in self._kept}
        return {spec.name: values[spec.name] for spec in self._manifest.downstream}

    def forget(self) -> None:
        """See `Estimator.forget`."""
        self._stash.clear()

    @property
    def stash_bytes(self) -> int:
        """See `Estimator.stash_bytes`."""
        return sum(a.nbytes for kept in self._stash.values() for a in kept.values())

    def _arrived(self, stash: Arrays, arriving: Arrays) -> tuple[Array | None, Arrays]:
        """The run's losses, where the stage has them, and all cotangents.

        Where the stage has a head, the gradient of that is now in the scratch buffer.
        """
        self._begin()
        name = next((n for n in OWN_LOSSES if n in self._graphs), None)
        if name is None:
            return None, arriving
        results = self._graphs[name].run({**stash, **arriving})
        ports = {p.role: p for p in self._specs[name].outputs}
        cotangent = ports[Role.COTANGENT]
        losses = results[ports[Role.LOSS].name] if name is GraphName.CRITERION else None
        return losses, {**arriving, cotangent.key: results[cotangent.name]}

    def _own(self, arriving: Arrays) -> Arrays:
        """The cotangents of what the stage itself makes."""
        made = {spec.name for spec in self._manifest.sends}
        made -= {spec.name for spec in self._manifest.receives}
        ends = ends_of(self._manifest)
        if GraphName.CRITERION not in self._graphs:
            ends = tuple(name for name in ends if name in made)
        return {name: arriving[name] for name in ends if name in arriving}

    def _begin(self) -> None:
        """Make room for the microbatch's gradient."""
        if self._parameters.take_first():
            self._parameters.gradient[...] = 0
        self._parameters.scratch[...] = 0
