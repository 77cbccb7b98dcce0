"""Which device gets which stage: first by arithmetic, then by what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from coordinator.assignment import Assignment
from coordinator.cut_codecs import residual_bytes
from coordinator.gradients import Chooser
from coordinator.job import Job, keep_of
from coordinator.plan_problem import task_of
from coordinator.prediction import Prediction, Surrounds, predict
from coordinator.pretrained import is_pretrained
from coordinator.profile_cache import NO_CACHE, ProfileCache
from coordinator.stage_costs import StageTimes, StageWork
from edgetrain.compiler.stash import Keep
from edgetrain.config import RunConfig
from edgetrain.errors import OverfullDeviceError, PlanError
from edgetrain.planner.placement import Placement
from edgetrain.planner.problem import RECOMPUTE, Problem
from edgetrain.planner.solution import Solution, plan
from edgetrain.train_config import AUTO
from edgetrain.wire.hello import Hello
from edgetrain.wire.messages import Ready

WORTHWHILE: Final = 0.85  # of the present plan's step, before a stage is moved
CANDIDATES: Final = 4  # placements that are played out, of those the search found best
ALIKE: Final = 1.01  # schedules this close are alike; the one that stashes least is taken
MOST_MICROBATCHES: Final = 64
LABEL_BYTES: Final = 8  # of a sample


class Planner:
    """Plans one run, and learns from it.

    Args:
        config: what was asked, as far as it can be kept.
        job: the model and its data.
        devices: those that may take part.
        cache: of what earlier runs measured.
    """

    def __init__(
        self,
        config: RunConfig,
        job: Job,
        devices: Mapping[str, Hello],
        cache: ProfileCache = NO_CACHE,
    ) -> None:
        self._config = config
        self.remarks = job.program.remarks
        self._hellos = _candidates(config, devices)
        self._chooser = Chooser(
            config, job.program, job.trainable, self._hellos, lambda: is_pretrained(job)
        )
        slowdowns = {name: self._chooser.slowdown(name) for name in self._hellos}
        self._task = task_of(config, job, self._hellos, slowdowns, cache)
        self._layers = self._task.layers
        self._costs = self._task.costs
        self._around = Surrounds(
            self._task.network,
            "first" if config.data.device else "coordinator",
            input_bytes=self._task.input_bytes,
            label_bytes=LABEL_BYTES * job.program.batch,
        )

    @property
    def microbatch(self) -> int:
        """Samples, as the model was prepared for."""
        return self._task.microbatch

    @property
    def microbatches(self) -> int:
        """Of a step, likewise."""
        return self._config.train.batch_size // self.microbatch

    def assign(self, *, explain: bool = True) -> Assignment:
        """Choose cuts, places and schedule with what is known of the devices so far.

        Args:
            explain: whether to say why devices are left out, which takes longer.

        Raises:
            PlanError: more stages than cuts, not enough memory, or a pin or mode that
                cannot be kept.
        """
        asked = self._config.train.schedule
        # from the least stash to the most
        schedules = ("1f1b", "1f1b-eager", "gpipe") if asked == AUTO else (asked,)
        best: Assignment | None = None
        failure: PlanError | None = None
        for schedule in schedules:
            try:
                found = self._best(schedule, explain=explain)
            except PlanError as error:
                failure = failure or error
                continue
            if best is None or found.step_s * ALIKE < best.step_s:
                best = found
        if best is None:
            raise failure or PlanError("no schedule to plan for")
        return best

    def best_microbatches(self) -> int:
        """How many microbatches make the shortest step, of all equal parts of a batch.

        Times at other sizes than the prepared one are scaled, not compiled.

        Raises:
            PlanError: as `assign`.
        """
        batch = self._config.train.batch_size
        most = min(batch, MOST_MICROBATCHES)
        counts = [count for count in range(1, most + 1) if batch % count == 0]
        asked = self._config.train.schedule
        schedule = "1f1b" if asked == AUTO else asked
        times: dict[int, float] = {}
        failure: PlanError | None = None
        for count in counts:
            try:
                problem = self._task.problem(schedule, count)
                times[count] = plan(problem, explain=False).placement.time_s
            except PlanError as error:
                failure = error
        if not times:
            raise failure or PlanError("no microbatch to plan for")
        return min(times, key=lambda count: (times[count], count))

    def improve(self, present: Assignment, measured: Sequence[Ready]) -> Assignment | None:
        """Plan again with what the devices measured when they loaded their stages.

        Returns:
            A better assignment, or None when moving is not worth it.
        """
        stages = zip(present.devices, present.layers, measured, strict=True)
        for (name, layers, ready), mode in zip(
            stages, present.gradients.modes, strict=True
        ):
            times = (ready.forward_s, ready.backward_s)
            self._costs.learn(name, layers, times, mode)
        if self._config.plan.cuts:
            return None
        better = self.assign()
        if better.placed == present.placed:
            return None
        return better if better.step_s < WORTHWHILE * self.step_s(present) else None

    def observe(self, present: Assignment, seconds: Sequence[float]) -> None:
        """Note what each stage computes in a step at present, its update included."""
        for name in dict.fromkeys(present.devices):
            self._costs.track(
                name,
                [
                    StageWork(layers, present.microbatches, taken_s)
                    for device, layers, taken_s in zip(
                        present.devices, present.layers, seconds, strict=True
                    )
                    if device == name
                ],
            )

    def correct_memory(self, present: Assignment, refusal: OverfullDeviceError) -> None:
        """Learn that a stage needs more memory than was counted.

        Raises:
            OverfullDeviceError: the plan is given, so no other can be made.
        """
        counted_bytes = present.memory_bytes[refusal.stage]
        if self._config.plan.cuts or counted_bytes >= refusal.needed_bytes:
            raise refusal
        self._costs.correct_memory(refusal.device, counted_bytes / refusal.needed_bytes)

    def step_s(self, assignment: Assignment) -> float:
        """What a step would take by what is known of the devices so far."""
        return self.predict(assignment).step_s

    def predict(
        self, assignment: Assignment, times: Sequence[StageTimes] = ()
    ) -> Prediction:
        """Play a plan out.

        Args:
            assignment: the plan.
            times: of its stages; empty: as they are known so far.
        """
        if not times:
            stages = zip(assignment.devices, assignment.layers, strict=True)
            times = [self._costs.stage(name, layers) for name, layers in stages]
        links = [self._task.links[name] for name in assignment.devices]
        return predict(assignment, times, links, self._around)

    def weights_of(self, layers: range) -> int:
        """Elements of the weights in a stage."""
        return sum(self._layers[index].weight_elements for index in layers)

    def _best(self, schedule: str, *, explain: bool) -> Assignment:
        """The best of the placements that the search offers, played out."""
        problem = self._task.problem(schedule, self.microbatches)
        solution = plan(problem, explain=explain)
        options = list(self._assignments(problem, solution))
        best = min(options, key=lambda option: option.step_s)
        return replace(best, gap=solution.gap, left_out=dict(solution.left_out))

    def _assignments(self, problem: Problem, solution: Solution) -> Iterator[Assignment]:
        failure: PlanError | None = None
        found = 0
        for placement in solution.alternatives[:CANDIDATES]:
            try:
                yield self._assignment(problem, placement)
                found += 1
            except PlanError as error:  # a mode that cannot be where it came to be
                failure = failure or error
        if not found:
            raise failure or PlanError("the search found no placement")

    def _assignment(self, problem: Problem, placement: Placement) -> Assignment:
        names = placement.devices
        layers = tuple(stage.layers for stage in placement.stages)
        cuts = tuple(self._layers[stage.stop - 1].output for stage in layers[:-1])
        gradients = self._chooser.choose(names, cuts)
        codecs = self._task.codecs.of_plan(names, self._task.links, gradients.modes)
        recompute = [stage.option == RECOMPUTE for stage in placement.stages]
        plain = keep_of(self._config)
        assignment = Assignment(
            devices=names,
            cuts=cuts,
            layers=layers,
            gradients=gradients,
            keeps=tuple(Keep.INPUTS if again else plain for again in recompute),
            blocks=tuple(self._hellos[name].block for name in names),
            schedule=problem.schedule,
            microbatches=problem.microbatches,
            memory_bytes=tuple(
                stage.memory_bytes + residual_bytes(codecs, cuts, number)
                for number, stage in enumerate(placement.stages)
            ),
            step_s=placement.time_s,
            bound_by=placement.bound_by,
            codecs=codecs,
        )
        return replace(assignment, step_s=self.step_s(assignment))


def _candidates(config: RunConfig, devices: Mapping[str, Hello]) -> dict[str, Hello]:
    """The devices that may get a stage: those named, or all there are."""
    pin = config.plan.pin
    for name in (pin.first, pin.last, config.data.device):
        if name and name not in devices:
            there = ", ".join(devices)
            raise PlanError(f"device {name!r} must have a stage but is not there: {there}")
    names = config.fleet.names or tuple(devices)
    stages = len(config.plan.cuts) + 1 if config.plan.cuts else config.plan.stages
    both_ends = pin.last is not None and pin.last == (pin.first or config.data.device)
    if isinstance(stages, int) and stages > len(names) + both_ends:
        raise PlanError(
            f"{stages} stages need {stages} devices, there are {len(names)}:"
            f" {', '.join(names)}. Start more agents or set [plan] stages lower"
        )
    return {name: devices[name] for name in sorted(names)}
