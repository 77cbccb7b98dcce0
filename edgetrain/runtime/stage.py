"""The numerical side of one stage: graphs, weights, gradients, optimizer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgetrain.bundle import Bundle
from edgetrain.errors import RunError
from edgetrain.estimator_spec import WEIGHTS
from edgetrain.losses import hit_share
from edgetrain.manifest import (
    GraphName,
    Manifest,
    Mode,
    Role,
)
from edgetrain.optimizer_spec import OptimizerSpec
from edgetrain.runtime.activation import Meter, MeteredEngine
from edgetrain.runtime.engines.base import Engine
from edgetrain.runtime.estimators.backprop import Backprop
from edgetrain.runtime.estimators.base import Arrays, Backward, Estimator, Tick
from edgetrain.runtime.estimators.carried_weights import CarriedWeights, Spsa
from edgetrain.runtime.estimators.forward_gradient import ForwardGradient
from edgetrain.runtime.estimators.hybrid import Hybrid
from edgetrain.runtime.estimators.identity import Identity
from edgetrain.runtime.estimators.local import local
from edgetrain.runtime.fallback import Fallback, gated
from edgetrain.runtime.memory_forecast import moved_copies, optimizer_states
from edgetrain.runtime.optim import flat
from edgetrain.runtime.optim.lr import learning_rate
from edgetrain.runtime.optim.table import make
from edgetrain.runtime.parameters import Parameters
from edgetrain.runtime.signal import Signal
from edgetrain.stage_state import StageState
from edgetrain.tensors import TensorSpec

WARM_UPS: Final = 3  # turns at least, of which the first is not counted
MOST_WARM_UPS: Final = 9
WARM_UP_S: Final = 0.4  # after so long no turn begins but those

Make = Callable[[Bundle, Engine, Parameters, int], Estimator]


def _forward_gradient(
    bundle: Bundle, engine: Engine, parameters: Parameters, seed: int
) -> Estimator:
    weights = bundle.manifest.estimator.noise == WEIGHTS
    made = CarriedWeights if weights else ForwardGradient
    return made(bundle, engine, parameters, seed)


ESTIMATORS: Final[Mapping[Mode, Make]] = {
    Mode.VJP: lambda bundle, engine, parameters, _: Backprop(bundle, engine, parameters),
    Mode.FROZEN: lambda bundle, engine, parameters, _: Backprop(bundle, engine, parameters),
    Mode.HYBRID: Hybrid,
    Mode.FORWARD_GRADIENT: _forward_gradient,
    Mode.SPSA: Spsa,
    Mode.IDENTITY: lambda bundle, engine, parameters, _: Identity(
        bundle, engine, parameters
    ),
    Mode.LOCAL_VJP: lambda bundle, engine, parameters, _: Backprop(
        bundle, engine, parameters
    ),
    Mode.LOCAL: local,
}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Of one microbatch: the loss of each sample, and its share of labels hit.

    `hits` is None where the loss has no classes.
    """

    losses: npt.NDArray[np.float32]
    hits: npt.NDArray[np.float64] | None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds for one microbatch, as it typically is."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A run on made-up values: its times, and all that it computed, by name."""

    timing: Timing
    results: Arrays


class Stage:
    """One stage, ready to train; knows nothing of messages.

    Args:
        bundle: what to run.
        engine: what runs it.
        optimizer: the same on every stage.
        microbatches: a step.
        seed: of the run, for perturbations.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        optimizer: OptimizerSpec,
        *,
        microbatches: int,
        seed: int,
    ) -> None:
        self.manifest: Manifest = bundle.manifest
        self.parameters = Parameters(bundle)
        self._fallback = Fallback(self.parameters) if gated(self.manifest) else None
        self.signal = Signal(self.manifest)
        self.parameters.noted = self.signal.add
        self._meter = Meter()
        engine = MeteredEngine(engine, self._meter)
        self._microbatches = microbatches
        self._spec = optimizer
        self._optimizer = make(optimizer, bundle.manifest.trainable_elements)
        if bundle.optimizer:
            self._optimizer.load(dict(bundle.optimizer))
        make_estimator = ESTIMATORS[self.manifest.mode]
        self._estimator = make_estimator(bundle, engine, self.parameters, seed)
        self._evaluate_spec = self.manifest.graphs[GraphName.EVALUATE]
        held = self.parameters.held(self._evaluate_spec)
        graph = bundle.graphs[GraphName.EVALUATE]
        self._evaluate = engine.load(graph, self._evaluate_spec, held)

    @property
    def stash_bytes(self) -> int:
        """Bytes kept at present for backwards to come."""
        return self._estimator.stash_bytes

    @property
    def memory_bytes(self) -> int:
        """Held at present: weights, commits, gradient, optimizer state and stash.

        The engine's own memory is not part of it.
        """
        elements = moved_copies(self.manifest) * self.manifest.elements
        elements += optimizer_states(self._spec) * self.manifest.trainable_elements
        kept = self._fallback.nbytes if self._fallback else 0
        return self.parameters.nbytes + 4 * elements + kept + self.stash_bytes

    def take_activation_peak(self) -> int:
        """The most bytes of activations at once since this was asked last.

        Of what the stage was given, what it keeps and gives, and what its graphs need.
        """
        return self._meter.take_peak()

    def forward(self, tick: Tick, activations: Arrays) -> Arrays:
        """Activations received to activations sent."""
        self._meter.note(activations.values())
        if tick.microbatch == 0:
            self.parameters.begin_step()
        return self._estimator.forward(tick, activations)

    def backward(self, tick: Tick, arriving: Arrays) -> Backward:
        """Cotangents, or labels for the loss or a head, to cotangents for upstream."""
        self._meter.note(arriving.values())
        return self._estimator.backward(tick, arriving)

    def revert(self, action: str) -> None:
        """See `Fallback.obey`.

        Raises:
            RunError: the stage did not keep its deployed weights.
        """
        if self._fallback is None:
            raise RunError(f"stage {self.manifest.stage} has nothing to go back to")
        self._fallback.obey(action)

    @property
    def _at_rest(self) -> bool:
        """The stage went back to its deployed weights, and keeps them."""
        return self._fallback is not None and self._fallback.final

    def square_sum(self) -> float:
        """Of the step's mean gradient, as far as it is applied."""
        if self._at_rest:
            return 0.0
        return flat.square_sum(self.parameters.gradient) / self._microbatches**2

    def update(self, step: int, total_square_sum: float | None = None) -> None:
        """Apply the step's gradient and commit.

        Args:
            step: from 0.
            total_square_sum: over all stages, when the gradient's norm is to be clipped.
        """
        gradient = self.parameters.gradient
        self.signal.close(gradient)
        if isinstance(self._estimator, Hybrid):
            self._estimator.heed(self.signal.mean, step)
        factor = 1 / self._microbatches
        if total_square_sum is not None and self._spec.clip_norm is not None:
            factor *= flat.clip_factor(total_square_sum, self._spec.clip_norm)
        if factor != 1:
            flat.scale_(gradient, factor)
        before = self.parameters.open_commit()
        if self._at_rest:
            before[...] = self.parameters.trainable
        elif gradient.size:
            rate = learning_rate(self._spec.lr, step)
            self._optimizer.step(self.parameters.trainable, gradient, rate, before)
        self.parameters.close_commit(step)

    def state(self, step: int) -> StageState | None:
        """A copy of all that the step after `step` needs; None if that is not the next."""
        if step != self.parameters.last:
            return None
        weights = self.parameters.committed(step)
        if weights is None:
            return None
        return StageState(step + 1, weights, self._optimizer.state())

    def evaluate_forward(self, activations: Arrays) -> Arrays:
        """As deployed: activations received to activations sent."""
        results = self._evaluate.run(activations)
        values = {**activations, **results}
        return {spec.name: values[spec.name] for spec in self.manifest.sends}

    def evaluate_loss(self, activations: Arrays, labels: npt.NDArray[Any]) -> Evaluation:
        """At the last stage: activations and labels to losses and hits."""
        results = self._evaluate.run({**activations, "labels": labels})
        ports = self._evaluate_spec.outputs
        losses = next(results[p.name] for p in ports if p.role is Role.LOSS)
        hits = None
        if labels.dtype.kind == "i":
            scores = next(results[p.name] for p in ports if p.role is Role.OUTPUT)
            hits = hit_share(scores, labels, self.manifest.loss_options)
        return Evaluation(losses, hits)

    def warm_up(self) -> Trial:
        """Run forward and backward on made-up values, leaving no trace in the weights."""
        before = self.parameters.weights.copy()
        forwards, backwards = [], []
        results: dict[str, npt.NDArray[Any]] = {}
        until = time.perf_counter() + WARM_UP_S
        for turn in range(MOST_WARM_UPS):
            tick = Tick(0, turn)
            self.parameters.begin_step()
            start = time.perf_counter()
            if turn >= WARM_UPS and start > until:
                break
            sent = self._estimator.forward(tick, self._made_up_received())
            middle = time.perf_counter()
            returned = self._estimator.backward(tick, self._made_up_arriving())
            forwards.append(middle - start)
            backwards.append(time.perf_counter() - middle)
            if turn == 0:
                gradient = {"gradient": self.parameters.gradient.copy()}
                state = {"state": self.parameters.weights.copy()}
                results = {**sent, **returned.cotangents, **gradient, **state}
            np.copyto(self.parameters.weights, before)
        self.parameters.gradient[...] = 0
        self.parameters.begin_step()
        self.signal.forget()
        self._estimator.forget()
        typical = Timing(statistics.median(forwards[1:]), statistics.median(backwards[1:]))
        return Trial(typical, results)

    def _made_up_received(self) -> Arrays:
        return _made_up((*self.manifest.receives, *self.manifest.rays.received))

    def _made_up_arriving(self) -> Arrays:
        names, labels = self.manifest.cotangents_in, self.manifest.labels
        specs = tuple(s for s in self.manifest.sends if s.name in names)
        specs = (*specs, *self.manifest.rays.slopes_in)
        return _made_up(specs if labels is None else (*specs, labels))


def _made_up(specs: tuple[TensorSpec, ...]) -> dict[str, npt.NDArray[Any]]:
    generator = np.random.Generator(np.random.Philox(0))
    values: dict[str, npt.NDArray[Any]] = {}
    for spec in specs:
        if spec.is_float:
            values[spec.name] = generator.standard_normal(spec.shape).astype(spec.dtype)
        else:
            values[spec.name] = np.zeros(spec.shape, spec.dtype)
    return values
