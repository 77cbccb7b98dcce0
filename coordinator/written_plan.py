"""A plan as it is written down: for the run folder, the report and whoever asks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from coordinator.assignment import Assignment
from coordinator.planning import Planner
from coordinator.prediction import Prediction
from coordinator.stage_costs import StageTimes
from edgetrain.plan import HopPlan, Plan, StagePlan
from edgetrain.wire.messages import Ready


def written(
    planner: Planner, assignment: Assignment, sha256: str, measured: Sequence[Ready] = ()
) -> Plan:
    """The plan, with the devices' own measurements of their stages where there are any.

    Args:
        planner: knows the rest.
        assignment: the plan.
        sha256: of the model file.
        measured: what each device reported of its stage; empty before they have any.
    """
    prediction = planner.predict(assignment)
    if measured:
        times = [
            StageTimes(ready.forward_s, ready.backward_s, known.update_s)
            for ready, known in zip(measured, prediction.times, strict=True)
        ]
        prediction = planner.predict(assignment, times)
    stages = [
        _stage(planner, assignment, prediction, number)
        for number in range(len(assignment.devices))
    ]
    memory_bytes = [(int(b), 0) for b in assignment.memory_bytes]
    if measured:
        memory_bytes = [(ready.memory_bytes, ready.activation_bytes) for ready in measured]
    return Plan(
        model_sha256=sha256,
        schedule=assignment.schedule,
        microbatches=assignment.microbatches,
        microbatch=planner.microbatch,
        stages=tuple(
            _with_memory(stage, *held)
            for stage, held in zip(stages, memory_bytes, strict=True)
        ),
        predicted_step_s=prediction.step_s,
        reason=_reason(assignment),
        remarks=planner.remarks,
        hops=tuple(
            HopPlan(
                hop.down_bytes,
                hop.up_bytes,
                hop.seconds,
                str(hop.codecs.activations),
                str(hop.codecs.cotangents),
            )
            for hop in prediction.hops
        ),
        left_out=dict(assignment.left_out),
        gap=assignment.gap,
    )


def _stage(
    planner: Planner, assignment: Assignment, prediction: Prediction, number: int
) -> StagePlan:
    layers, times = assignment.layers[number], prediction.times[number]
    cuts = assignment.cuts
    crossing = cuts[number].crossing if number < len(cuts) else ()
    return StagePlan(
        stage=number,
        device=assignment.devices[number],
        cut=tuple(spec.name for spec in crossing),
        mode=assignment.gradients.modes[number].value,
        reason=assignment.gradients.reasons[number],
        layers=len(layers),
        parameters=planner.weights_of(layers),
        predicted_forward_s=times.forward_s,
        predicted_backward_s=times.backward_s,
        predicted_memory_bytes=0,
        predicted_update_s=times.update_s,
        stash=assignment.keeps[number].value,
    )


def _with_memory(stage: StagePlan, memory_bytes: int, activation_bytes: int) -> StagePlan:
    return msgspec.structs.replace(
        stage,
        predicted_memory_bytes=memory_bytes,
        predicted_activation_bytes=activation_bytes,
    )


def _reason(assignment: Assignment) -> str:
    count = len(assignment.devices)
    plural = "s" if count > 1 else ""
    proof = "no other plan is faster" if not assignment.gap else "the best plan found"
    if assignment.gap:
        proof += f", at most {assignment.gap:.1%} from the fastest"
    bound = f"; {assignment.bound_by} sets the pace" if assignment.bound_by else ""
    return (
        f"{count} stage{plural} under {assignment.schedule}: by the cost model"
        f" {proof}{bound}"
    )
