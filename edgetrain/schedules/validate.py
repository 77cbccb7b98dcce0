"""Runs a schedule against mailboxes, without devices: does it end, how long, what stash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgetrain.errors import PlanError
from edgetrain.schedules.actions import Action, Op, StageActions, lower, text


@dataclass(frozen=True, slots=True)
class Times:
    """How long each stage's work takes.

    Attributes:
        forward_s, backward_s: of one microbatch, per stage.
        hop_s: per cut, from the end of an action to its tensor lying in the neighbour's
            mailbox; the same downstream and upstream. One fewer than stages.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    hop_s: Sequence[float]

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        if stages < 1 or len(self.backward_s) != stages or len(self.hop_s) != stages - 1:
            raise PlanError(
                f"times of {stages} forward, {len(self.backward_s)} backward stages and"
                f" {len(self.hop_s)} hops: there must be as many backward as forward times,"
                " at least one of each, and one hop fewer"
            )

    @classmethod
    def balanced(
        cls, stages: int, *, forward_s: float, backward_s: float, hop_s: float = 0.0
    ) -> Times:
        """The same times for every stage and every cut."""
        return cls((forward_s,) * stages, (backward_s,) * stages, (hop_s,) * (stages - 1))


@dataclass(frozen=True, slots=True)
class Span:
    """When an action ran. A receive spans the time the stage waited for the tensor."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One simulated step.

    Attributes:
        spans: the lowered actions of each stage, in its order.
        period_s: from the first action to the end of the last one.
        bubble: the part of all stages' time in which they do not compute, 0 to 1.
        stash_peak: the most microbatches stashed at once, per stage.
    """

    spans: tuple[tuple[Span, ...], ...]
    period_s: float
    bubble: float
    stash_peak: tuple[int, ...]


@dataclass(slots=True)
class _Stage:
    """One stage that works through its actions on its own clock."""

    actions: tuple[Action, ...]
    keeps_stash: bool
    clock_s: float = 0.0
    busy_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    stash: set[int | None] = field(default_factory=set)
    stash_peak: int = 0

    @property
    def next(self) -> Action | None:
        done = len(self.spans)
        return self.actions[done] if done < len(self.actions) else None

    def finish(self, action: Action, end_s: float) -> None:
        self.spans.append(Span(action, self.clock_s, end_s))
        self.clock_s = end_s

    def compute(self, action: Action, duration_s: float) -> None:
        self._count_stash(action)
        self.busy_s += duration_s
        self.finish(action, self.clock_s + duration_s)

    def _count_stash(self, action: Action) -> None:
        m = action.microbatch
        if action.op is Op.FORWARD and self.keeps_stash:
            self.stash.add(m)
            self.stash_peak = max(self.stash_peak, len(self.stash))
        elif action.op is Op.BACKWARD:
            if m not in self.stash:
                raise PlanError(
                    f"the schedule runs {action} without a stash: a microbatch goes"
                    " forward before it comes back, and comes back once"
                )
            self.stash.discard(m)
        elif action.op is Op.UPDATE and self.stash:
            raise PlanError(
                f"the schedule updates stage {action.stage} before the backward of"
                f" microbatches {sorted(map(str, self.stash))}"
            )


# The mailbox of a tensor: the stage it lies at, how it is received, its microbatch.
_Slot = tuple[int, Op, int | None]


class _Simulation:
    def __init__(self, stages: Sequence[_Stage], times: Times) -> None:
        self._stages = stages
        self._times = times
        self._mail: dict[_Slot, float] = {}

    def run(self) -> None:
        """Advance every stage as far as it goes, again and again, until all are done.

        The order in which stages are advanced does not matter: each one's actions are in
        a fixed order, and an arrival time depends only on the sender's clock.
        """
        progress = True
        while progress:
            progress = False
            for stage in self._stages:
                while (action := stage.next) is not None and self._try(stage, action):
                    progress = True
        self._check_end()

    def _try(self, stage: _Stage, action: Action) -> bool:
        """Run the action unless it waits for a tensor nobody has sent yet."""
        s, m, times = action.stage, action.microbatch, self._times
        match action.op:
            case Op.RECV_ACTIVATION | Op.RECV_COTANGENT:
                arrival_s = self._mail.pop((s, action.op, m), None)
                if arrival_s is None:
                    return False
                stage.finish(action, max(stage.clock_s, arrival_s))
            case Op.SEND_ACTIVATION:
                self._put((s + 1, Op.RECV_ACTIVATION, m), stage.clock_s + times.hop_s[s])
                stage.finish(action, stage.clock_s)
            case Op.SEND_COTANGENT:
                self._put((s - 1, Op.RECV_COTANGENT, m), stage.clock_s + times.hop_s[s - 1])
                stage.finish(action, stage.clock_s)
            case Op.FORWARD:
                stage.compute(action, times.forward_s[s])
            case Op.BACKWARD:
                stage.compute(action, times.backward_s[s])
            case Op.UPDATE:
                stage.compute(action, 0.0)
        return True

    def feed(self, microbatches: int) -> None:
        """Lay the input of every microbatch before stage 0."""
        for m in range(microbatches):
            self._put((0, Op.RECV_ACTIVATION, m), 0.0)

    def _put(self, slot: _Slot, arrival_s: float) -> None:
        if slot in self._mail:
            raise PlanError(f"the schedule sends twice what {_name(slot)} receives once")
        self._mail[slot] = arrival_s

    def _check_end(self) -> None:
        waiting = [stage.next for stage in self._stages if stage.next is not None]
        if waiting:
            raise PlanError(
                f"the schedule stops before its end: {text(waiting)} wait for tensors that"
                " nobody sends any more"
            )
        if self._mail:
            raise PlanError(f"the schedule never runs {_name(next(iter(self._mail)))}")
        for s, stage in enumerate(self._stages):
            if stage.stash:
                raise PlanError(
                    f"stage {s} ends with the stash of microbatches"
                    f" {sorted(map(str, stage.stash))}: their backward is missing"
                )


def simulate(schedule: StageActions, microbatches: int, times: Times) -> Timeline:
    """Play one step of a schedule on all stages and report its timeline.

    Every input is there at time 0, sends take no time of the stage, a hop has a latency
    but the link no queue, and an update is free.

    Args:
        schedule: the compute actions of each stage; `lower` adds the messages.
        microbatches: M of the step.
        times: of every stage and cut; as many stages as it has forward times.

    Raises:
        PlanError: the schedule waits for something that never comes, leaves a tensor or a
            stash behind, runs a backward without its forward, or there is no microbatch.
    """
    count = len(times.forward_s)
    if microbatches < 1:
        raise PlanError(f"{microbatches} microbatches: a step needs at least one")
    stages = []
    for s in range(count):
        compute = tuple(schedule(s, count, microbatches))
        keeps_stash = any(action.op is Op.BACKWARD for action in compute)
        stages.append(_Stage(tuple(lower(compute, count)), keeps_stash))
    simulation = _Simulation(stages, times)
    simulation.feed(microbatches)
    simulation.run()
    period_s = max(stage.clock_s for stage in stages)
    busy_s = sum(stage.busy_s for stage in stages)
    return Timeline(
        spans=tuple(tuple(stage.spans) for stage in stages),
        period_s=period_s,
        bubble=1.0 - busy_s / (count * period_s) if period_s > 0.0 else 0.0,
        stash_peak=tuple(stage.stash_peak for stage in stages),
    )


def _name(slot: _Slot) -> Action:
    stage, op, microbatch = slot
    return Action(stage, op, microbatch)
