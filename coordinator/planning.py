"""Which device gets which stage: first by arithmetic, then by what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from coordinator.job import keep_of
from edgetrain.compiler.cut import Cut, CutFinder
from edgetrain.compiler.cut import Layer as CutLayer
from edgetrain.compiler.forecast import stash_forecast
from edgetrain.compiler.program import Program
from edgetrain.config import RunConfig
from edgetrain.errors import PlanError
from edgetrain.manifest import Mode
from edgetrain.plan import Plan, StagePlan
from edgetrain.planner.partition import Device, Layer, best_order
from edgetrain.schedules.table import SCHEDULES
from edgetrain.schedules.validate import Times, simulate
from edgetrain.train_config import AUTO
from edgetrain.wire.messages import Hello, Ready

# Until links are measured: what one hop over a broker on the same machine carries.
LINK_BYTES_PER_S: Final = 50e6
HOP_S: Final = 1e-3
BACKWARD_TO_FORWARD: Final = 2.0
# Weights, an earlier commit, gradient, scratch, and up to two optimizer states.
BUFFERS: Final = 6
WORTHWHILE: Final = 0.8  # of the present bottleneck, before a stage is moved


@dataclass(frozen=True, slots=True)
class Assignment:
    """Stages in pipeline order.

    Attributes:
        devices: their names.
        cuts: between them.
        modes: how each obtains its gradients.
        reasons: for each stage, one sentence.
        layers: planner's layers in each.
        bottleneck_s: predicted for one microbatch on the slowest stage.
        blocks: of each device's own layout.
    """

    devices: tuple[str, ...]
    cuts: tuple[Cut, ...]
    modes: tuple[Mode, ...]
    reasons: tuple[str, ...]
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
    """

    def __init__(
        self,
        config: RunConfig,
        program: Program,
        trainable: frozenset[str],
        devices: Mapping[str, Hello],
    ) -> None:
        self._config = config
        self._remarks = program.remarks
        self._finder = CutFinder(program, trainable)
        self._hellos = _chosen(config, devices)
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
        schedule = SCHEDULES[config.train.schedule]
        stages = len(devices)
        in_flight = [
            schedule.stash_peak(stage, stages, config.train.microbatch_count)
            for stage in range(stages)
        ]
        first = config.plan.pin.first or config.data.device
        placement = best_order(layers, devices, first, config.plan.pin.last, in_flight)
        names = tuple(device.name for device in placement.devices)
        chosen = [self._mode(stage, name) for stage, name in enumerate(names)]
        return Assignment(
            names,
            tuple(self._layers[stage.stop - 1].output for stage in placement.stages[:-1]),
            tuple(mode for mode, _ in chosen),
            tuple(reason for _, reason in chosen),
            placement.stages,
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
                    mode=assignment.modes[stage].value,
                    reason=assignment.reasons[stage],
                    layers=len(layers),
                    parameters=sum(layer.weight_elements for layer in layers),
                    predicted_forward_s=ready.forward_s,
                    predicted_backward_s=ready.backward_s,
                    predicted_memory_bytes=ready.memory_bytes,
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
        """Times at one flop a second: a device's speed is then its flop a second."""
        return Layer(
            forward_s=float(max(layer.flop, 1)),
            backward_s=BACKWARD_TO_FORWARD * max(layer.flop, 1),
            memory_bytes=4 * BUFFERS * layer.weight_elements,
            output_bytes=layer.output.nbytes,
            stash_bytes=stash_bytes,
        )

    def _device(self, name: str) -> Device:
        hello = self._hellos[name]
        mode, _ = self._mode(None, name)
        speed = self._speeds[name]
        if mode in (Mode.HYBRID, Mode.LOCAL):
            speed *= (1 + BACKWARD_TO_FORWARD) / (1 + 2 * self._config.estimator.tangents)
        return Device(name, speed, hello.memory_bytes, LINK_BYTES_PER_S)

    def _mode(self, stage: int | None, name: str) -> tuple[Mode, str]:
        """The gradient mode of a device, and why."""
        offered = self._hellos[name].gradient
        asked = self._config.train.gradient_of(-1 if stage is None else stage, name)
        if AUTO not in (asked, offered) and asked != offered:
            raise PlanError(
                f"[train] gradient asks {asked!r} of device {name!r}, which offers only"
                f" {offered!r}: leave it 'auto', or place that stage elsewhere"
            )
        if asked != AUTO:
            return Mode(asked), f"gradient {asked!r} was asked for"
        if offered != AUTO:
            return Mode(offered), f"{name} declares itself {offered!r} only"
        return Mode.VJP, f"{name} runs backward graphs, so its gradients are exact"


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
