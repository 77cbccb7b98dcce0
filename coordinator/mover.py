"""Notices that devices have become slower or faster, and moves the run to a better plan."""

from __future__ import annotations

import logging
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.assignment import Assignment
from coordinator.deployed import Deployed, Draft, Supply
from coordinator.metrics import MoveMetrics
from coordinator.pipeline_loop import PipelineLoop
from coordinator.planning import Planner
from coordinator.rollout import Rollout
from coordinator.tally import StageTotals, Tally
from edgetrain.errors import DeviceError, EdgeTrainError
from edgetrain.manifest import Mode
from edgetrain.plan import Plan
from edgetrain.stage_state import ModelState

log = logging.getLogger(__name__)

CHECK_STEPS: Final = 4  # between two looks; the median of so many is what counts
LEAST_GAIN: Final = 0.05  # of a step's time; less is within what a model can be wrong by
MARGIN: Final = 1.5  # the gain over all steps to come, in costs of a move


@dataclass(frozen=True, slots=True)
class Course:
    """What stays the same whichever plan is in force."""

    rollout: Rollout
    planner: Planner
    supply: Supply
    total_steps: int
    clock: Callable[[], float]

    def plan(self, deployed: Deployed) -> Plan:
        """The plan in force, as it is written down."""
        return self.rollout.plan(self.planner, deployed)


class Mover:
    """Watches one run.

    A stage's time is that of its last few steps, so a hiccup does not count, and a drift
    must be seen twice. The new plan is compiled while the old one goes on; the state of
    the run then moves between two steps.

    Weights end as they would have without the move, to rounding, as all stages are exact;
    runs with other stages, or with codecs that keep a residual, stay where they are, since
    these have a state of their own.

    Args:
        course: of the run.
        deployed: the plan in force.
        allowed: whether the run may move at all.
    """

    def __init__(self, course: Course, deployed: Deployed, *, allowed: bool) -> None:
        self._course = course
        self._deployed = deployed
        self._planned_s = _ready_s(deployed)
        modes = deployed.assignment.gradients.modes
        feedback = any(codecs.feedback for codecs in deployed.assignment.codecs)
        exact = {Mode.VJP, Mode.FROZEN}.issuperset(modes)
        self._allowed = allowed and exact and not feedback
        self._next_look = CHECK_STEPS
        self._suspect = False
        self._drafting: _Drafting | None = None
        self._reason = ""

    @property
    def total_steps(self) -> int:
        """Of the run."""
        return self._course.total_steps

    def due(self, tally: Tally) -> bool:
        """Whether a better plan is ready; cheap enough to ask after every step."""
        if self._drafting is not None:
            return self._drafting.done
        done = tally.committed + 1
        if not self._allowed or done < self._next_look:
            return False
        self._next_look = done + CHECK_STEPS
        better = self._better(tally)
        if better is not None and self._suspect:
            self._drafting = _Drafting(self._course.rollout, better)
        self._suspect = better is not None
        return False

    def move(self, loop: PipelineLoop) -> tuple[Plan, MoveMetrics] | None:
        """Put the plan that is ready in force; between two steps only.

        Returns:
            The plan in force and what is to be written down; None if the old one stays.

        Raises:
            DeviceError, FleetError: neither the new nor the old plan can be deployed.
        """
        drafting, self._drafting = self._drafting, None
        self._suspect = False
        if drafting is None or drafting.draft is None:
            self._allowed = False  # it would fail again
            return None
        course, start_s = self._course, self._course.clock()
        stayed_s = course.planner.step_s(self._deployed.assignment)
        state = loop.state()
        try:
            deployed = self._deploy(drafting.draft, state)
        except DeviceError as error:
            log.warning("the plan stays as it is: %s", error)
            self._allowed = False
            deployed = self._deploy(self._deployed.draft, state)
        loop.move(course.rollout.pipeline(deployed, course.supply))
        self._deployed = deployed
        self._planned_s = _ready_s(deployed)
        self._next_look = state.steps + CHECK_STEPS
        return course.plan(deployed), MoveMetrics(
            step=state.steps,
            move_devices=deployed.assignment.devices,
            move_reason=self._reason,
            stayed_s=stayed_s,
            moved_s=course.planner.step_s(deployed.assignment),
            pause_s=course.clock() - start_s,
        )

    def replay_s(self, tally: Tally) -> float | None:
        """What a step takes on the virtual clock, with what its stages really computed.

        Beside what was measured, it tells errors of the network's model from those of the
        stages' times. None before the first step.
        """
        present = self._deployed.assignment
        if not all(totals.recent for totals in tally.stages):
            return None
        known = self._course.planner.predict(present).times
        times = [
            stage.taking(_computed_s(totals), present.microbatches)
            for stage, totals in zip(known, tally.stages, strict=True)
        ]
        return self._course.planner.predict(present, times).step_s

    def _deploy(self, draft: Draft, state: ModelState) -> Deployed:
        course = self._course
        return course.rollout.deploy(draft, course.supply, course.total_steps, state)

    def _better(self, tally: Tally) -> Assignment | None:
        """A plan that is worth its move, as the devices are now."""
        course, present = self._course, self._deployed.assignment
        seconds = [
            statistics.median(d.compute_s for d in list(totals.recent)[-CHECK_STEPS:])
            for totals in tally.stages
        ]
        course.planner.observe(present, seconds)
        better = course.planner.assign(explain=False)
        if better.placed == present.placed:
            return None
        stayed_s, moved_s = course.planner.step_s(present), course.planner.step_s(better)
        gain_s = stayed_s - moved_s
        left = course.total_steps - tally.committed - 1
        if (
            gain_s < LEAST_GAIN * stayed_s
            or gain_s * left < MARGIN * self._deployed.seconds
        ):
            return None
        self._reason = _reason(present, self._planned_s, seconds)
        return better


class _Drafting:
    """A plan that is being compiled on a thread of its own."""

    def __init__(self, rollout: Rollout, assignment: Assignment) -> None:
        self.draft: Draft | None = None
        self._rollout = rollout
        self._assignment = assignment
        self._thread = threading.Thread(target=self._run, name="drafting", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.draft = self._rollout.draft(self._assignment)
        except EdgeTrainError as error:
            log.warning("no better plan: %s", error)


def _computed_s(totals: StageTotals) -> float:
    """Of a stage in a step, as lately."""
    return statistics.median(done.compute_s for done in totals.recent)


def _ready_s(deployed: Deployed) -> list[float]:
    """What each stage would compute in a step, as it was measured when it was loaded."""
    microbatches = deployed.assignment.microbatches
    return [microbatches * (r.forward_s + r.backward_s) for r in deployed.ready]


def _reason(
    assignment: Assignment, planned_s: Sequence[float], seconds: Sequence[float]
) -> str:
    """The device whose time changed most."""
    pairs = zip(planned_s, seconds, strict=True)
    factors = [now / max(then, 1e-9) for then, now in pairs]
    stage = max(
        range(len(factors)), key=lambda n: max(factors[n], 1 / max(factors[n], 1e-9))
    )
    device, factor = assignment.devices[stage], factors[stage]
    return f"{device} takes {factor:.2g} times as long as when its stage was placed"
