"""What a placement is predicted to take, stage by stage: the cost model, written plainly.

The search works on tables of the same costs; this is what its answers are checked by.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgetrain.errors import PlanError
from edgetrain.planner.problem import PLAIN, RECOMPUTE, Device, Problem, ranges_text

Assigned = tuple[str, range]
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """One stage of a placement.

    Attributes:
        device: its name.
        layers: it runs.
        option: how, `PLAIN` or `RECOMPUTE`.
        forward_s, backward_s: of one microbatch; recomputing counts as backward.
        send_s: for which one microbatch holds the device's link.
        memory_bytes: at the most.
    """

    device: str
    layers: range
    option: str
    forward_s: float
    backward_s: float
    send_s: float
    memory_bytes: float

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages in pipeline order, and what they are predicted to take.

    Attributes:
        slowest_s: for which one microbatch holds a processor or a link at the longest.
        bottleneck_s: the same, or for which it holds the broker: what lies between
            one microbatch and the next, once the pipeline is full.
        fill_s: one microbatch's way through the empty pipeline, and back in training.
        time_s: what the plan minimises: the bottleneck, or in training the step.
        bound_by: what sets the bottleneck, such as ``stage 2 on pi-3``.
    """

    stages: tuple[PlacedStage, ...]
    slowest_s: float
    bottleneck_s: float
    fill_s: float
    time_s: float
    bound_by: str

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(stage.device for stage in self.stages)

    @property
    def assigned(self) -> tuple[Assigned, ...]:
        return tuple((stage.device, stage.layers) for stage in self.stages)


def evaluate(problem: Problem, assigned: Sequence[Assigned]) -> Placement:
    """Predict what a placement takes.

    With M microbatches the step of a synchronous schedule takes::

        time_s = fill_s + (M - 1) * bottleneck_s

    where `fill_s` sums, over the stages, forward and backward of one microbatch and, over
    the cuts, one hop each way; and `bottleneck_s` is the longest time for which one
    microbatch holds a resource: a device's processor (forward + backward of all its
    stages), a device's link, or the broker. For inference there is no backward and no
    hop back, and `time_s` is `bottleneck_s`.

    A hop of n bytes takes n / link + latency of its sender, and n / link + latency of its
    receiver as well when it goes through the broker; its sender's link is held for
    n / link + hop_overhead_s. A link carries both directions at once.

    Args:
        problem: layers, devices and objective.
        assigned: device name and layers of each stage, in pipeline order.

    Raises:
        PlanError: the stages do not cover the layers in order, name a device that is not
            there, or overfill a device's memory.

    Source: the shape is GPipe's (Huang et al., NeurIPS 2019) and PipeDream-Flush's, with
    links as resources beside the stages as in DAPPLE (Fan et al., PPoPP 2021, section on
    pipeline latency). We differ from DAPPLE in that its pivot stage is ours for all of the
    steady phase (it adds what the stages after the pivot leave over), and that a device's
    link is shared by what it sends both ways. Hops that 1F1B leaves on the critical path
    are not in it: the event-driven timeline is for those.
    """
    devices = {device.name: device for device in problem.devices}
    _check_cover(problem, assigned, devices)
    stages = _placed(problem, assigned, devices)
    loads = _loads(problem, stages, devices)
    slowest_s = float(max(loads.values()))
    passed_s = _broker_s(problem, stages)
    bottleneck_s = max(slowest_s, passed_s)
    bound_by = "the broker"
    if slowest_s >= passed_s:
        bound_by = max(loads, key=lambda name: loads[name])
    fill_s = float(sum(stage.compute_s for stage in stages))
    for before, after in itertools.pairwise(stages):
        fill_s += _hops_s(problem, devices[before.device], devices[after.device], after)
    steady_s = (problem.microbatches - 1) * bottleneck_s
    time_s = fill_s + steady_s if problem.training else bottleneck_s
    return Placement(stages, slowest_s, bottleneck_s, fill_s, time_s, bound_by)


def crossing_bytes(problem: Problem, cut: int) -> tuple[float, float]:
    """Bytes a microbatch sends down and back up over the cut before layer `cut`."""
    if not 0 < cut < len(problem.layers):
        return 0.0, 0.0
    layer = problem.layers[cut - 1]
    if not problem.training:
        return layer.output_bytes, 0.0
    back = layer.cotangent_bytes
    return layer.output_bytes, layer.output_bytes if back is None else back


def stage_memory_bytes(problem: Problem, layers: range, peak: int, option: str) -> float:
    """What a stage holds with `peak` microbatches in flight.

    Recomputing keeps what the stage received for each, and one microbatch's stash while
    it goes back.
    """
    mine = problem.layers[layers.start : layers.stop]
    stash_bytes = sum(layer.stash_bytes for layer in mine)
    fixed_bytes = sum(layer.memory_bytes for layer in mine)
    if option == PLAIN:
        return fixed_bytes + peak * stash_bytes
    received_bytes = problem.input_bytes
    if layers.start > 0:
        received_bytes = problem.layers[layers.start - 1].received_bytes
    return fixed_bytes + peak * received_bytes + stash_bytes


def _check_cover(
    problem: Problem, assigned: Sequence[Assigned], devices: dict[str, Device]
) -> None:
    end = 0
    for name, layers in assigned:
        if name not in devices:
            raise PlanError(f"device {name!r} is not among {', '.join(sorted(devices))}")
        if layers.start != end or layers.stop <= end or layers.step != 1:
            raise PlanError(f"a stage has {ranges_text(layers)}, but layer {end} is next")
        end = layers.stop
    if end != len(problem.layers):
        raise PlanError(f"the stages end at layer {end} of {len(problem.layers)}")


def _placed(
    problem: Problem, assigned: Sequence[Assigned], devices: dict[str, Device]
) -> tuple[PlacedStage, ...]:
    """Each stage with the fastest options that fit, chosen per device."""
    chosen: dict[int, PlacedStage] = {}
    for name in dict.fromkeys(name for name, _ in assigned):
        mine = [index for index, (other, _) in enumerate(assigned) if other == name]
        best: list[PlacedStage] | None = None
        for options in _mixes(problem.options, len(mine)):
            trial = [
                _stage(problem, devices[name], assigned[index][1], len(assigned) - index, o)
                for index, o in zip(mine, options, strict=True)
            ]
            held_bytes = sum(stage.memory_bytes for stage in trial)
            fits = held_bytes <= devices[name].memory_bytes * (1.0 + _ROUNDING)
            if fits and (best is None or _compute_s(trial) < _compute_s(best)):
                best = trial
        if best is None:
            raise PlanError(
                f"the layers of device {name!r} do not fit its"
                f" {devices[name].memory_bytes:.0f} B of memory"
            )
        chosen.update(zip(mine, best, strict=True))
    return tuple(chosen[index] for index in range(len(assigned)))


def _mixes(options: Sequence[str], count: int) -> list[tuple[str, ...]]:
    mixes: list[tuple[str, ...]] = [()]
    for _ in range(count):
        mixes = [(*mix, option) for mix in mixes for option in options]
    return mixes


def _compute_s(stages: Sequence[PlacedStage]) -> float:
    return sum(stage.compute_s for stage in stages)


def _stage(
    problem: Problem, device: Device, layers: range, to_end: int, option: str
) -> PlacedStage:
    forward_s = sum(device.forward_s[layers.start : layers.stop])
    backward_s = 0.0
    if problem.training:
        backward_s = sum(device.backward_s[layers.start : layers.stop])
        backward_s += forward_s if option == RECOMPUTE else 0.0
    held_bytes = stage_memory_bytes(problem, layers, problem.peak(to_end), option)
    send_s = _link_s(problem, device, [layers])
    return PlacedStage(
        device.name, layers, option, forward_s, backward_s, send_s, held_bytes
    )


def _link_s(problem: Problem, device: Device, parts: Sequence[range]) -> float:
    """For how long one microbatch of the stages holds their device's link."""
    up_bytes = down_bytes = overhead_s = 0.0
    for layers in parts:
        received, sent_back = crossing_bytes(problem, layers.start)
        sent, received_back = crossing_bytes(problem, layers.stop)
        up_bytes += sent + sent_back
        down_bytes += received + received_back
        messages = (layers.stop < len(problem.layers)) + (
            problem.training and layers.start > 0
        )
        overhead_s += messages * problem.hop_overhead_s
    if problem.topology == "broker":
        up_bytes = max(up_bytes, down_bytes)
    return up_bytes / device.link_bytes_per_s + overhead_s


def _hops_s(problem: Problem, before: Device, after: Device, stage: PlacedStage) -> float:
    """One microbatch's way over the cut before `stage`, and back in training."""
    down, up = crossing_bytes(problem, stage.layers.start)
    ways = [(down, before, after), (up, after, before)][: 1 + problem.training]
    total_s = 0.0
    for size, sender, receiver in ways:
        total_s += size / sender.link_bytes_per_s + sender.latency_s
        total_s += problem.hop_overhead_s
        if problem.topology == "broker":
            total_s += size / receiver.link_bytes_per_s + receiver.latency_s
    return total_s


def _loads(
    problem: Problem, stages: Sequence[PlacedStage], devices: dict[str, Device]
) -> dict[str, float]:
    """For how long one microbatch holds each resource, by what it is called."""
    loads: dict[str, float] = {}
    for name in dict.fromkeys(stage.device for stage in stages):
        mine = [i for i, stage in enumerate(stages) if stage.device == name]
        which = " and ".join(str(i) for i in mine)
        plural = "s" if len(mine) > 1 else ""
        loads[f"stage{plural} {which} on {name}"] = _compute_s([stages[i] for i in mine])
        loads[f"the link of {name}"] = _link_s(
            problem, devices[name], [stages[i].layers for i in mine]
        )
    return loads


def _broker_s(problem: Problem, stages: Sequence[PlacedStage]) -> float:
    """For how long one microbatch holds the broker."""
    if not problem.broker_limited:
        return 0.0
    passed = sum(sum(crossing_bytes(problem, stage.layers.start)) for stage in stages)
    return passed / problem.broker_bytes_per_s
