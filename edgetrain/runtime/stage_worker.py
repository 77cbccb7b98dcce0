"""The loop that drives one stage: it waits for tensors, computes, and reports."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from edgetrain.errors import DivergedError, EdgeTrainError, RunError
from edgetrain.runtime.estimators.base import Arrays, Tick
from edgetrain.runtime.evaluation import EvaluationSums
from edgetrain.runtime.exchange import Exchange
from edgetrain.runtime.stage import Stage
from edgetrain.runtime.surroundings import Surroundings
from edgetrain.runtime.told import Told
from edgetrain.schedules.actions import Action, Op, lower
from edgetrain.schedules.table import SCHEDULES
from edgetrain.wire.frame import Kind
from edgetrain.wire.messages import (
    Command,
    Deploy,
    Evaluate,
    Failed,
    Fetch,
    GradientNorm,
    NormTotal,
    Release,
    Revert,
    StepDone,
    Train,
)
from edgetrain.wire.reassembly import Message

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
_T = TypeVar("_T")


class _ReleasedError(Exception):
    """The coordinator has let the stage go."""


@dataclass(slots=True)
class _Tally:
    """What a step adds up to."""

    since: float
    sent_before: int
    loss_sum: float = 0.0
    samples: int = 0
    compute_s: float = 0.0
    stash_peak_bytes: int = 0
    memory_peak_bytes: int = 0


class StageWorker:
    """Runs one stage until it is released."""

    def __init__(self, deploy: Deploy, stage: Stage, world: Surroundings) -> None:
        self._deploy = deploy
        self._ids = (deploy.run, deploy.epoch, deploy.stage)
        self._stage = stage
        self._world = world
        self._exchange = Exchange(
            deploy, stage.manifest, world.outbox, self._obey, clock=world.clock
        )
        stages = stage.manifest.stages
        compute = SCHEDULES[deploy.schedule](deploy.stage, stages, deploy.microbatches)
        self._actions = tuple(lower(compute, stages))
        self._held: dict[int, Arrays] = {}  # what a microbatch's last action gave
        self._evaluations: deque[Evaluate] = deque()
        self._norms: dict[int, float] = {}
        self._allowed = stage.parameters.last
        self._step = self._allowed + 1
        self._exchange.advance(self._step)  # tensors may come before leave to train does
        self._failed = False
        self._told = Told(world.report)
        self._block = 0  # the last one to be evaluated
        self._tally = _Tally(world.clock(), 0)

    def give(self, item: Message | Command) -> None:
        """Hand over what arrived for this stage, from any thread."""
        self._exchange.give(item)

    def run(self) -> None:
        """Train, evaluate and hand out weights as told; returns when released."""
        # a run that diverges is told so by its loss, not by warnings on the way there
        with np.errstate(over="ignore", invalid="ignore"):
            try:
                while True:
                    self._next()
            except _ReleasedError:
                log.info("stage %d released", self._deploy.stage)

    def _next(self) -> None:
        try:
            if self._failed:
                self._exchange.wait()
            elif self._evaluations:
                self._evaluate(self._evaluations.popleft())
            elif self._step <= self._allowed:
                self._train_step()
                self._step += 1
            else:
                self._exchange.wait()
        except EdgeTrainError as error:
            self._fail(str(error), diverged=isinstance(error, DivergedError))
        except _ReleasedError:
            raise
        except Exception as error:  # else the coordinator would wait for a dead thread
            log.exception("stage %d: unforeseen", self._deploy.stage)
            self._fail(f"a defect of edgetrain, see the agent's log: {error!r}")

    def _fail(self, reason: str, *, diverged: bool = False) -> None:
        """Report, and keep the weights for whoever fetches them."""
        log.error("stage %d, step %d: %s", self._deploy.stage, self._step, reason)
        self._failed = True
        self._told.say(Failed(*self._ids, self._step, reason, diverged))

    def _heard(self, command: Command) -> bool:
        """Whether it came before; then what came of it is told again."""
        known = (isinstance(command, Train) and command.last_step <= self._allowed) or (
            isinstance(command, Evaluate) and command.block <= self._block
        )
        if known:
            self._told.again()
        return known

    def _obey(self, command: Command) -> None:
        if self._heard(command):
            return
        match command:
            case Train(last_step=last_step):
                self._allowed = max(self._allowed, last_step)
            case NormTotal(step=step, square_sum=square_sum):
                self._norms[step] = square_sum
            case Evaluate(block=block):
                self._block = block
                self._evaluations.append(command)
            case Fetch(step=step, state=state):
                self._hand_over(step) if state else self._hand_out(step)
            case Revert(stage=stage, action=action):
                if stage == self._deploy.stage:
                    self._stage.revert(action)
            case Release():
                raise _ReleasedError
            case Deploy():
                pass  # the agent's business

    def _train_step(self) -> None:
        self._exchange.advance(self._step)
        self._stage.take_activation_peak()  # of what came before
        for action in self._actions:
            self._act(action)
        tally, now = self._tally, self._world.clock()
        hops = self._exchange.hops.take()
        done = StepDone(
            *self._ids,
            step=self._step,
            loss_sum=tally.loss_sum,
            samples=tally.samples,
            seconds=now - tally.since,
            compute_s=tally.compute_s,
            sent_bytes=self._exchange.sent_bytes - tally.sent_before,
            stash_peak_bytes=tally.stash_peak_bytes,
            memory_peak_bytes=tally.memory_peak_bytes,
            signal_to_noise=self._stage.signal.mean,
            activation_peak_bytes=self._stage.take_activation_peak(),
            away_s=hops.away_s,
            turnaround_s=hops.turnaround_s,
        )
        self._told.say(done)
        self._exchange.packer.observe(done.seconds)
        self._tally = _Tally(now, self._exchange.sent_bytes)

    def _act(self, action: Action) -> None:
        m = -1 if action.microbatch is None else action.microbatch
        tick = Tick(self._step, m)
        match action.op:
            case Op.RECV_ACTIVATION:
                self._held[m] = self._activations(tick)
            case Op.FORWARD:
                self._exchange.wait_for_room()
                activations = self._held.pop(m)
                self._held[m] = self._timed(lambda: self._stage.forward(tick, activations))
                stash_bytes = max(self._tally.stash_peak_bytes, self._stage.stash_bytes)
                self._tally.stash_peak_bytes = stash_bytes
                held_bytes = self._stage.memory_bytes + self._exchange.packer.nbytes
                memory_bytes = max(self._tally.memory_peak_bytes, held_bytes)
                self._tally.memory_peak_bytes = memory_bytes
            case Op.SEND_ACTIVATION:
                self._exchange.send_activations(tick, self._held.pop(m))
            case Op.RECV_COTANGENT:
                self._held[m] = self._exchange.take(Kind.COTANGENT, tick)
            case Op.BACKWARD:
                self._held[m] = self._backward(tick, self._held.pop(m))
            case Op.SEND_COTANGENT:
                self._exchange.send_cotangents(tick, self._held.pop(m))
            case Op.UPDATE:
                total = self._total_square_sum()
                self._timed(lambda: self._stage.update(self._step, total))
                self._held.clear()

    def _activations(self, tick: Tick) -> Arrays:
        source = self._world.source
        if source is None:
            return self._exchange.take(Kind.ACTIVATION, tick)
        inputs, labels = source.training(tick)
        if labels is not None:
            self._exchange.send_labels(tick, labels)
        return inputs

    def _backward(self, tick: Tick, arriving: Arrays) -> Arrays:
        if self._stage.manifest.labels is not None:
            arriving = {**arriving, **self._exchange.take(Kind.LABELS, tick)}
        result = self._timed(lambda: self._stage.backward(tick, arriving))
        if result.losses is not None:
            if not np.isfinite(result.losses).all():
                raise DivergedError(tick.step)
            self._tally.loss_sum += float(result.losses.sum(dtype=np.float64))
            self._tally.samples += len(result.losses)
        return result.cotangents

    def _total_square_sum(self) -> float | None:
        """Of the whole model's gradient, where its norm is to be clipped."""
        if self._deploy.optimizer.clip_norm is None:
            return None
        own = GradientNorm(*self._ids, self._step, self._stage.square_sum())
        self._told.say(own)
        while self._step not in self._norms:
            self._exchange.wait()
        return self._norms.pop(self._step)

    def _evaluate(self, task: Evaluate) -> None:
        self._exchange.advance(task.block, evaluation=True)
        sums = EvaluationSums(task)
        for m in range(task.microbatches):
            tick = Tick(task.block, m)
            activations = self._evaluation_input(task.first + m, tick)
            if not self._stage.manifest.is_last:
                values = self._stage.evaluate_forward(activations)
                self._exchange.send_activations(tick, values, evaluation=True)
                continue
            labels = self._exchange.take(Kind.LABELS, tick, evaluation=True)["labels"]
            sums.add(self._stage.evaluate_loss(activations, labels))
        if self._stage.manifest.is_last:
            self._told.say(sums.report())
        self._tally = _Tally(self._world.clock(), self._exchange.sent_bytes)

    def _evaluation_input(self, microbatch: int, tick: Tick) -> Arrays:
        source = self._world.source
        if source is None:
            return self._exchange.take(Kind.ACTIVATION, tick, evaluation=True)
        inputs, labels = source.evaluation(microbatch)
        if labels is not None:
            self._exchange.send_labels(tick, labels, evaluation=True)
        return inputs

    def _hand_out(self, step: int) -> None:
        weights = self._stage.parameters.committed(step)
        if weights is None:
            raise RunError(f"the weights after step {step} are no longer kept")
        self._exchange.send_weights(step + 1, weights)

    def _hand_over(self, step: int) -> None:
        state = self._stage.state(step)
        if state is None:
            raise RunError(f"the state after step {step} is not the present one")
        self._exchange.send_state(step + 1, state.encode())

    def _timed(self, work: Callable[[], _T]) -> _T:
        start = self._world.clock()
        result = work()
        self._tally.compute_s += self._world.clock() - start
        return result
