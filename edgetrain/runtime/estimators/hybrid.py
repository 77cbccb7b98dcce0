"""Gradients from plain forwards, contracted with an exact cotangent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from edgetrain.bundle import Bundle
from edgetrain.manifest import GraphName, Role, view
from edgetrain.runtime.engines.base import Array, Engine, LoadedGraph
from edgetrain.runtime.estimators.base import Arrays, Backward, Tick
from edgetrain.runtime.estimators.noise import NoiseKey, normal
from edgetrain.runtime.parameters import Parameters

WEIGHT_STEP: Final = 1e-3
ACTIVATION_STEP: Final = 1e-2  # times the activation's root mean square
TANGENTS: Final = 4
SMALLEST: Final = 1e-30
UPSTREAM_LAYER: Final = 1 << 16  # noise of activations, apart from that of any weight


@dataclass(frozen=True, slots=True)
class Perturbation:
    """How a stage is perturbed.

    Attributes:
        seed: of the run; every device derives the same noise from it.
        tangents: perturbations of the weights, and of the received activations, a
            microbatch.
    """

    seed: int
    tangents: int = TANGENTS


class Hybrid:
    """Mode ``hybrid``: the engine only ever runs the stage's forward graph.

    With c the cotangent that arrives and f the stage, the gradient of the weights W is
    estimated a microbatch at a time by a central difference along V ~ N(0, 1)::

        s = <c, f(x; W + eV) - f(x; W - eV)> / 2e        gradient = s V

    unbiased up to O(e^2), as E[V V'] = 1. The stage's last linear op and what follows it
    get the exact gradient from its input and c (graph `contract`) and are not perturbed.
    Cotangents for upstream are estimated alike, with one scalar a sample::

        s_b = <c_b, f(x_b + eU_b) - f(x_b - eU_b)> / 2e        cotangent_b = s_b U_b

    BatchNormalization uses its running statistics here, so samples are independent.

    Source: Baydin et al., Gradients without backpropagation (arXiv:2202.08587), and, for
    cutting the contraction short at an exact cotangent, HOSL (arXiv:2601.10940). Ours: a
    fresh perturbation for every microbatch, the exact last linear op, and the estimated
    cotangent for upstream.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        parameters: Parameters,
        perturbation: Perturbation,
    ) -> None:
        self._manifest = bundle.manifest
        self._parameters = parameters
        self._perturbation = perturbation
        self._specs = bundle.manifest.graphs
        self._graphs: dict[str, LoadedGraph] = {
            name: engine.load(bundle.graphs[name], spec, parameters.held(spec))
            for name, spec in self._specs.items()
            if name != GraphName.EVALUATE
        }
        forward = self._specs[GraphName.FORWARD]
        self._moved_weights = parameters.weights.copy()
        held = parameters.held(forward, self._moved_weights)
        self._moved = self._graphs[GraphName.FORWARD].holding(held)
        self._inputs = [p.name for p in forward.inputs if p.role is Role.ACTIVATION]
        self._outputs = {p.name for p in forward.outputs if p.role is Role.ACTIVATION}
        contract = self._specs.get(GraphName.CONTRACT)
        exact = {p.key for p in contract.ports(Role.GRADIENT)} if contract else set()
        self._estimated = {
            layer: weight
            for layer, weight in enumerate(self._manifest.weights)
            if weight.trainable and weight.name not in exact
        }
        self._kept = {
            port.name
            for name in self._graphs
            for port in self._specs[name].inputs
            if port.role in (Role.ACTIVATION, Role.STASH)
        }
        self._stash: dict[Tick, dict[str, Array]] = {}

    def forward(self, tick: Tick, activations: Arrays) -> Arrays:
        """See `Estimator.forward`."""
        results = self._graphs[GraphName.FORWARD].run(activations)
        values = {**activations, **results}
        self._stash[tick] = {name: values[name] for name in self._kept}
        return {spec.name: values[spec.name] for spec in self._manifest.sends}

    def backward(self, tick: Tick, arriving: Arrays) -> Backward:
        """See `Estimator.backward`."""
        stash = self._stash.pop(tick)
        losses = None
        if GraphName.CRITERION in self._graphs:
            losses, arriving = self._criterion(stash, arriving)
        own = {name: c for name, c in arriving.items() if name in self._outputs}
        if self._parameters.take_first():
            self._parameters.gradient[...] = 0
        self._parameters.scratch[...] = 0
        if own:
            self._contract(stash, own)
            self._estimate_gradient(tick, stash, own)
        self._parameters.accumulate()
        return Backward(self._estimate_upstream(tick, stash, arriving, own), losses)

    @property
    def stash_bytes(self) -> int:
        """See `Estimator.stash_bytes`."""
        return sum(a.nbytes for kept in self._stash.values() for a in kept.values())

    def _criterion(self, stash: Arrays, arriving: Arrays) -> tuple[Array, Arrays]:
        """The loss of each sample, and its cotangent at the model's output."""
        results = self._graphs[GraphName.CRITERION].run({**stash, **arriving})
        ports = {p.role: p for p in self._specs[GraphName.CRITERION].outputs}
        cotangent = ports[Role.COTANGENT]
        return results[ports[Role.LOSS].name], {cotangent.key: results[cotangent.name]}

    def _contract(self, stash: Arrays, cotangents: Arrays) -> None:
        """Exact gradients, from the last linear op on, into the scratch buffer."""
        if GraphName.CONTRACT in self._graphs:
            ports = self._specs[GraphName.CONTRACT].ports(Role.COTANGENT)
            seeds = {p.name: cotangents[p.key] for p in ports}
            self._graphs[GraphName.CONTRACT].run({**stash, **seeds})

    def _estimate_gradient(self, tick: Tick, stash: Arrays, cotangents: Arrays) -> None:
        """One scalar a tangent for all estimated weights together."""
        tangents = self._perturbation.tangents if self._estimated else 0
        for k in range(tangents):
            noise = {
                layer: self._noise(tick, layer, k, weight.shape)
                for layer, weight in self._estimated.items()
            }

            def shifted(size: float, noise: Mapping[int, Array] = noise) -> Arrays:
                np.copyto(self._moved_weights, self._parameters.weights)
                for layer, weight in self._estimated.items():
                    part = view(self._moved_weights, weight)
                    part += np.float32(size) * noise[layer]
                return self._moved.run(stash)

            scalar = _slopes(shifted, WEIGHT_STEP, cotangents, 1).item() / tangents
            for layer, weight in self._estimated.items():
                part = view(self._parameters.scratch, weight)
                part += np.float32(scalar) * noise[layer]

    def _estimate_upstream(
        self, tick: Tick, stash: Arrays, arriving: Arrays, own: Arrays
    ) -> Arrays:
        """Cotangents of the received activations; what passes through stays exact."""
        wanted = self._manifest.cotangents_out
        found = {name: arriving[name] for name in wanted if name in arriving}
        layers = {name: UPSTREAM_LAYER + i for i, name in enumerate(wanted)}
        for name in (n for n in wanted if n in self._inputs):
            x = stash[name]
            samples = self._independent(x, *own.values())
            estimate = np.zeros_like(x)
            size = ACTIVATION_STEP * max(_root_mean_square(x), SMALLEST)
            tangents = self._perturbation.tangents if own else 0
            for k in range(tangents):
                noise = self._noise(tick, layers[name], k, x.shape)

                def shifted(step: float, name: str = name, noise: Array = noise) -> Arrays:
                    moved = stash[name] + np.float32(step) * noise
                    return self._graphs[GraphName.FORWARD].run({**stash, name: moved})

                scalars = _slopes(shifted, size, own, samples) / tangents
                rows = noise.reshape(samples, -1)
                estimate += (scalars.astype(x.dtype)[:, None] * rows).reshape(x.shape)
            found[name] = found[name] + estimate if name in found else estimate
        return found

    def _independent(self, *arrays: Array) -> int:
        """How many groups of rows have nothing to do with each other.

        Those of a microbatch's samples, if all tensors begin with them; else there is one.
        """
        samples = self._manifest.microbatch
        return samples if all(a.shape[:1] == (samples,) for a in arrays) else 1

    def _noise(self, tick: Tick, layer: int, k: int, shape: tuple[int, ...]) -> Array:
        key = NoiseKey(self._perturbation.seed, tick.step, tick.microbatch, layer, k)
        return normal(key, shape)


def _slopes(
    shifted: Callable[[float], Arrays], size: float, cotangents: Arrays, samples: int
) -> npt.NDArray[np.float64]:
    """<c, f(+size) - f(-size)> / 2 size, of each sample, in double precision."""
    plus, minus = shifted(size), shifted(-size)
    total = np.zeros(samples)
    for name, cotangent in cotangents.items():
        change = np.subtract(plus[name], minus[name], dtype=np.float64) * cotangent
        total += change.reshape(samples, -1).sum(axis=1)
    return total / (2 * size)


def _root_mean_square(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
