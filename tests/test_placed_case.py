"""Placements, as the planner predicts them and as the timeline plays them."""

from __future__ import annotations

import dataclasses

import pytest
from brute_placement import random_problem

from edgetrain.errors import PlanError
from edgetrain.planner.placed_case import case_of
from edgetrain.planner.placement import evaluate
from edgetrain.planner.solution import plan
from edgetrain.planner.timeline import play
from edgetrain.planner.timeline_case import Case, TimedDevice, TimedStage

SEEDS = range(60)


def placed(seed):
    problem = random_problem(seed)
    try:
        return problem, plan(problem).placement
    except PlanError:
        pytest.skip("nothing fits")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_timeline_is_never_faster_than_the_busiest_resource(seed):
    problem, placement = placed(seed)
    timeline = play(case_of(problem, placement, data_on="first"))
    count = problem.microbatches
    busiest_s = {}
    for stage in placement.stages:
        busy_s = stage.compute_s if problem.training else stage.forward_s
        busiest_s[stage.device] = busiest_s.get(stage.device, 0.0) + busy_s * count
    steps = len(timeline.step_end_s)
    assert timeline.end_s >= steps * max(busiest_s.values()) * (1 - 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_is_the_planner_s_but_for_what_waits(seed):
    problem, placement = placed(seed)
    timeline = play(case_of(problem, placement, data_on="first"), steps=2)
    for s, stage in enumerate(placement.stages):
        case_stage = timeline.case.stages[s]
        counted = case_stage.memory_bytes + timeline.stash_peak[s] * case_stage.stash_bytes
        assert counted == pytest.approx(stage.memory_bytes)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_microbatch_takes_the_fill(seed):
    """Alone in the pipeline it waits for nobody; frames are as large as messages."""
    problem, placement = placed(seed)
    problem = dataclasses.replace(problem, microbatches=1, hop_overhead_s=0.0)
    placement = evaluate(problem, placement.assigned)
    case = case_of(problem, placement, data_on="first")
    network = dataclasses.replace(case.network, chunk_bytes=10**15, broker_bytes_per_s=1e30)
    case = dataclasses.replace(case, network=network)
    timeline = play(case, steps=1)
    taken_s = timeline.end_s - timeline.nodes[0].start_s
    if problem.topology == "broker":
        assert taken_s == pytest.approx(placement.fill_s)
    else:  # the planner takes the sender's link alone
        assert taken_s >= placement.fill_s * (1 - 1e-9)


def test_a_fused_loss_leaves_the_last_stage_idle_while_gpipe_fills():
    stages = tuple(TimedStage(name, 1.0, 2.0) for name in ("a", "b"))
    devices = (TimedDevice("a"), TimedDevice("b"))
    fused = (stages[0], TimedStage("b", 0.0, 3.0))
    for schedule, apart_s, fused_s in (("gpipe", 27.0, 34.0), ("1f1b", 27.0, 27.0)):
        assert play(Case(stages, devices, schedule, 8)).period_s == apart_s
        assert play(Case(fused, devices, schedule, 8)).period_s == fused_s
