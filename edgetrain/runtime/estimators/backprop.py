"""Exact gradients: the compiled backward graph run as plain inference."""

from __future__ import annotations

from typing import Final

from edgetrain.bundle import Bundle
from edgetrain.manifest import GraphName, GraphSpec, Role
from edgetrain.runtime.engines.base import Array, Engine, LoadedGraph
from edgetrain.runtime.estimators.base import Arrays, Backward, Tick
from edgetrain.runtime.parameters import Parameters

BACKWARDS: Final = (GraphName.LOSS, GraphName.BACKWARD)


class Backprop:
    """Mode ``vjp``; ``local_vjp``; and ``frozen``, which only hands cotangents on.

    The last stage runs one fused graph in its backward and nothing in its forward; every
    other stage runs `forward`, keeps the stash, and gives it to `backward`: with the
    cotangents that arrive, or, with ``local_vjp``, with the labels for its own head.

    Source: for ``local_vjp``, Belilovsky et al., Decoupled greedy learning of CNNs
    (arXiv:1901.08164). Ours: exact up to the stage's first layer, one head a stage.
    """

    def __init__(self, bundle: Bundle, engine: Engine, parameters: Parameters) -> None:
        self._manifest = bundle.manifest
        self._parameters = parameters
        self._specs = bundle.manifest.graphs
        self._graphs: dict[str, LoadedGraph] = {
            name: engine.load(bundle.graphs[name], spec, parameters.held(spec))
            for name, spec in self._specs.items()
            if name not in (GraphName.EVALUATE, GraphName.HEAD)
        }
        self._backward = next((n for n in BACKWARDS if n in self._graphs), None)
        self._kept: frozenset[str] = frozenset()
        if self._backward is not None:
            spec = self._specs[self._backward]
            held = parameters.held(spec, gradient=parameters.gradient)
            self._first = self._graphs[self._backward].holding(held)
            roles = (Role.ACTIVATION, Role.STASH)
            self._kept = frozenset(p.name for p in spec.inputs if p.role in roles)
        self._stash: dict[Tick, dict[str, Array]] = {}

    def forward(self, tick: Tick, activations: Arrays) -> Arrays:
        """See `Estimator.forward`."""
        results = {}
        if GraphName.FORWARD in self._graphs:
            results = self._graphs[GraphName.FORWARD].run(activations)
            self._absorb_statistics(self._specs[GraphName.FORWARD], results)
        values = {**activations, **results}
        if self._backward is not None:
            self._stash[tick] = {name: values[name] for name in self._kept}
        return {spec.name: values[spec.name] for spec in self._manifest.sends}

    def backward(self, tick: Tick, arriving: Arrays) -> Backward:
        """See `Estimator.backward`."""
        if self._backward is None:
            return Backward(self._upstream(arriving))
        spec = self._specs[self._backward]
        feeds = self._stash.pop(tick)
        for port in spec.inputs:
            if port.role in (Role.COTANGENT, Role.LABELS):
                feeds[port.name] = arriving[port.key]
        if self._parameters.take_first():
            results = self._first.run(feeds)
        else:
            results = self._graphs[self._backward].run(feeds)
            self._parameters.accumulate()
        self._absorb_statistics(spec, results)
        ports = [p for p in spec.outputs if p.role is Role.COTANGENT]
        cotangents = {**arriving, **{p.key: results[p.name] for p in ports}}
        losses = [results[p.name] for p in spec.outputs if p.role is Role.LOSS]
        return Backward(self._upstream(cotangents), losses[0] if losses else None)

    def forget(self) -> None:
        """See `Estimator.forget`."""
        self._stash.clear()

    @property
    def stash_bytes(self) -> int:
        """See `Estimator.stash_bytes`."""
        return sum(a.nbytes for kept in self._stash.values() for a in kept.values())

    def _upstream(self, cotangents: Arrays) -> Arrays:
        return {name: cotangents[name] for name in self._manifest.cotangents_out}

    def _absorb_statistics(self, spec: GraphSpec, results: Arrays) -> None:
        batch = {p.key: results[p.name] for p in spec.outputs if p.role is Role.STATISTIC}
        if batch:
            self._parameters.absorb_statistics(batch)
