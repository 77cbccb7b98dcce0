"""From a placement to what the timeline simulates."""

from __future__ import annotations

import dataclasses

from edgetrain.planner.placement import PlacedStage, Placement, crossing_bytes
from edgetrain.planner.problem import PLAIN, Problem
from edgetrain.planner.timeline_case import Case, Network, TimedDevice, TimedStage


def case_of(
    problem: Problem,
    placement: Placement,
    network: Network | None = None,
    *,
    fused_loss: bool = True,
    **more: object,
) -> Case:
    """The case that a placement stands for.

    Args:
        problem: what was planned.
        placement: its stages.
        network: hop and op overheads, and the chunk; topology and the broker's rate are
            the problem's. None: hops take the problem's `hop_overhead_s`.
        fused_loss: as in a run, the last stage's forward is part of its backward: one
            graph goes forward, computes the loss and goes back.
        more: other fields of `Case`, such as `data_on` or `label_bytes`.
    """
    network = dataclasses.replace(
        network or Network(hop_s=problem.hop_overhead_s),
        topology=problem.topology,
        broker_bytes_per_s=problem.broker_bytes_per_s,
    )
    used = set(placement.devices)
    stages = [_stage(problem, stage) for stage in placement.stages]
    if fused_loss and problem.training:
        both_s = stages[-1].forward_s + stages[-1].backward_s
        stages[-1] = dataclasses.replace(stages[-1], forward_s=0.0, backward_s=both_s)
    case = Case(
        stages=tuple(stages),
        devices=tuple(
            TimedDevice(d.name, d.link_bytes_per_s, d.link_bytes_per_s, d.latency_s)
            for d in problem.devices
            if d.name in used
        ),
        schedule=problem.schedule if problem.training else "forward_only",
        microbatches=problem.microbatches,
        network=network,
        input_bytes=problem.input_bytes,
    )
    return dataclasses.replace(case, **more)  # type: ignore[arg-type]  # Case checks them


def _stage(problem: Problem, stage: PlacedStage) -> TimedStage:
    mine = [problem.layers[index] for index in stage.layers]
    stash_bytes = sum(layer.stash_bytes for layer in mine)
    memory_bytes = sum(layer.memory_bytes for layer in mine)
    if stage.option != PLAIN:  # keeps what it received, and one stash while it goes back
        memory_bytes += stash_bytes
        stash_bytes = problem.input_bytes
        if stage.layers.start > 0:
            stash_bytes = problem.layers[stage.layers.start - 1].received_bytes
    return TimedStage(
        stage.device,
        stage.forward_s,
        stage.backward_s,
        output_bytes=crossing_bytes(problem, stage.layers.stop)[0],
        cotangent_bytes=crossing_bytes(problem, stage.layers.start)[1],
        stash_bytes=stash_bytes,
        memory_bytes=memory_bytes,
    )
