"""Which device gets which stage: first by arithmetic, then by what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from coordinator.gradients import BACKWARD_TO_FORWARD, Chooser, Gradients
from coordinator.job import keep_of
from edgetrain.compiler.cut import Cut, CutFinder
from edgetrain.compiler.cut import Layer as CutLayer
from edgetrain.compiler.forecast import stash_forecast
from edgetrain.compiler.program import Program
from edgetrain.config import RunConfig
from edgetrain.errors import PlanError
from edgetrain.plan import Plan, StagePlan
from edgetrain.planner.problem import Device, Layer, Problem
from edgetrain.planner.solution import plan
from edgetrain.schedules.table import SCHEDULES
from edgetrain.schedules.validate import Times, simulate
from edgetrain.wire.hello import Hello
from edgetrain.wire.messages import Ready

# Until links are measured: what one hop over a broker on the same machine carries.
LINK_BYTES_PER_S: Final = 50e6
HOP_S: Final = 1e-3
# Weights, an earlier commit, gradient, scratch, and up to two optimizer states.
BUFFERS: Final = 6
WORTHWHILE: Final = 0.8  # of the present bottleneck, before a stage is moved


@dataclass(frozen=True, slots=True)
class Assignment:
    """Stages in pipeline order.

    Attributes:
        devices: their names.
        cuts: between them.
        gradients: how each obtains its gradients.
        layers: planner's layers in each.
        bottleneck_s: predicted for one microbatch on the slowest stage.
        blocks: of each device's own layout.
    """

    devices: tuple[str, ...]
    cuts: tuple[Cut, ...]
    gradients: Gradients
    layers: tuple[range, ...]
    bottleneck_s: float
    blocks: tuple[int, ...]


class Planner:
    """Plans one run.

    Args:
        config: what was asked.
        program: the model.
        trainable: weights whose users must stay in one stage.
        devices: those that may take part.
        pretrained: tells whether the model is, at the cost of an evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        program: Program,
        trainable: frozenset[str],
        devices: Mapping[str, Hello],
        pretrained: Callable[[], bool],
    ) -> None:
        self._config = config
        self._remarks = program.remarks
        self._finder = CutFinder(program, trainable)
        self._hellos = _chosen(config, devices)
        self._chooser = Chooser(config, program, trainable, self._hellos, pretrained)
        self._layers = self._cut_layers()
        self._stash_bytes = stash_forecast(
            program,
            trainable,
            [self._finder.nodes[layer.start : layer.stop] for layer in self._layers],
            keep_of(config),
            batch_statistics=config.train.batchnorm == "train",
        )
        self._speeds = {n: hello.flop_per_s for n, hello in self._hellos.items()}

    def assign(self) -> Assignment:
        """Choose cuts and places with what is known of the devices so far.

        Raises:
            PlanError: more stages than cuts, not enough memory, or a pin or mode that
                cannot be kept.
        """
        config = self._config
        layers = [
            self._priced(layer, stash_bytes)
            for layer, stash_bytes in zip(self._layers, self._stash_bytes, strict=True)
        ]
        devices = [self._device(name) for name in self._hellos]
        if len(layers) < len(devices):
            raise PlanError(
                f"{len(devices)} stages are asked for, but this model has only"
                f" {len(layers) - 1} valid cuts, enough for {len(layers)} stages: set"
                " [plan] stages or [fleet] devices lower"
            )
        problem = Problem(
            tuple(layers),
            tuple(devices),
            microbatches=config.train.microbatch_count,
            schedule=config.train.schedule,
            samples=config.train.microbatch,
            pin_first=config.plan.pin.first or config.data.device,
            pin_last=config.plan.pin.last,
            stages=len(devices),
        )
        _check_ends(problem)
        placement = plan(problem).placement
        names = placement.devices
        stages = tuple(stage.layers for stage in placement.stages)
        cuts = tuple(self._layers[s.stop - 1].output for s in stages[:-1])
        return Assignment(
            names,
            cuts,
            self._chooser.choose(names, cuts),
            stages,
            placement.bottleneck_s,
            tuple(self._hellos[name].block for name in names),
        )

    def improve(self, present: Assignment, measured: Sequence[Ready]) -> Assignment | None:
        """Plan again with each device's measured speed.

        Returns:
            A better assignment, or None when moving is not worth it.
        """
        if self._config.plan.cuts:
            return None
        for name, stage, ready in zip(
            present.devices, present.layers, measured, strict=True
        ):
            flop = sum(self._layers[i].flop for i in stage) * (1 + BACKWARD_TO_FORWARD)
            seconds = max(ready.forward_s + ready.backward_s, 1e-6)
            self._speeds[name] = max(flop, 1) / seconds
        slowest_s = max(ready.forward_s + ready.backward_s for ready in measured)
        better = self.assign()
        if better.bottleneck_s < WORTHWHILE * slowest_s and (
            better.layers != present.layers or better.devices != present.devices
        ):
            return better
        return None

    def plan(
        self, assignment: Assignment, measured: Sequence[Ready], model_sha256: str
    ) -> Plan:
        """The plan as it is written down, with the devices' own measurements."""
        train = self._config.train
        stages = []
        for stage, name in enumerate(assignment.devices):
            layers = [self._layers[i] for i in assignment.layers[stage]]
            ready = measured[stage]
            crossing = (
                assignment.cuts[stage].crossing if stage < len(assignment.cuts) else ()
            )
            stages.append(
                StagePlan(
                    stage=stage,
                    device=name,
                    cut=tuple(spec.name for spec in crossing),
                    mode=assignment.gradients.modes[stage].value,
                    reason=assignment.gradients.reasons[stage],
                    layers=len(layers),
                    parameters=sum(layer.weight_elements for layer in layers),
                    predicted_forward_s=ready.forward_s,
                    predicted_backward_s=ready.backward_s,
                    predicted_memory_bytes=ready.memory_bytes,
                    predicted_activation_bytes=ready.activation_bytes,
                )
            )
        times = Times(
            [stage.predicted_forward_s for stage in stages],
            [stage.predicted_backward_s for stage in stages],
            [HOP_S] * (len(stages) - 1),
        )
        schedule = SCHEDULES[train.schedule]
        timeline = simulate(schedule, train.microbatch_count, times)
        reason = (
            f"{len(stages)} stages for {len(stages)} devices, cut where the slowest stage,"
            f" as measured, is fastest; {train.schedule} as asked"
        )
        return Plan(
            model_sha256,
            train.schedule,
            train.microbatch_count,
            train.microbatch,
            tuple(stages),
            timeline.period_s,
            reason,
            self._remarks,
        )

    def _cut_layers(self) -> tuple[CutLayer, ...]:
        names = self._config.plan.cuts
        if not names:
            return self._finder.layers()
        cuts = [self._finder.named(n if isinstance(n, str) else n[0]) for n in names]
        if sorted({cut.position for cut in cuts}) != [cut.position for cut in cuts]:
            raise PlanError(
                "[plan] cuts are not in the order of the model, or one is twice"
            )
        end = replace(self._finder.layers()[-1].output)
        return self._finder.between([*cuts, end])

    def _priced(self, layer: CutLayer, stash_bytes: int) -> Layer:
        return Layer(
            layer.output.name,
            memory_bytes=4 * BUFFERS * layer.weight_elements,
            output_bytes=layer.output.nbytes,
            stash_bytes=stash_bytes,
        )

    def _device(self, name: str) -> Device:
        hello = self._hellos[name]
        speed = self._speeds[name] / self._chooser.slowdown(name)
        if not speed > 0.0:
            raise PlanError(
                f"device {name!r} announces a speed of {speed} flop/s: it must be above 0;"
                " probe it again"
            )
        forward_s = tuple(max(layer.flop, 1) / speed for layer in self._layers)
        return Device(
            name,
            forward_s,
            tuple(BACKWARD_TO_FORWARD * time_s for time_s in forward_s),
            hello.memory_bytes,
            LINK_BYTES_PER_S,
        )


def _check_ends(problem: Problem) -> None:
    if problem.pin_first and problem.pin_first == problem.pin_last and problem.stages != 1:
        raise PlanError(
            f"device {problem.pin_first!r} is pinned to both the first and the last stage,"
            " but a device runs one stage: pin only one of them, or use one device"
        )


def _chosen(config: RunConfig, devices: Mapping[str, Hello]) -> dict[str, Hello]:
    """The devices that get a stage: those named or pinned, then the fastest."""
    wanted = config.plan.stages
    if not isinstance(wanted, int):
        wanted = len(config.plan.cuts) + 1 if config.plan.cuts else config.fleet.count
    pin = config.plan.pin
    needed = [n for n in (pin.first, pin.last, config.data.device) if n]
    for name in needed:
        if name not in devices:
            there = ", ".join(devices)
            raise PlanError(f"device {name!r} must have a stage but is not there: {there}")
    candidates = config.fleet.names or tuple(devices)
    ranked = sorted(candidates, key=lambda n: (n not in needed, -devices[n].flop_per_s, n))
    if wanted > len(ranked):
        raise PlanError(
            f"{wanted} stages need {wanted} devices, there are {len(ranked)}:"
            f" {', '.join(ranked)}. Start more agents or set [plan] stages lower"
        )
    return {name: devices[name] for name in sorted(ranked[:wanted])}
