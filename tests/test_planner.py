"""The planner against brute force, and laws that any planner has to keep."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from brute_placement import best, price, random_problem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgetrain.errors import PlanError
from edgetrain.planner.approximate import approximate, exact_work
from edgetrain.planner.exact import LOAD, Solver
from edgetrain.planner.placement import evaluate
from edgetrain.planner.problem import Device, Layer, Problem
from edgetrain.planner.search import optimise
from edgetrain.planner.solution import plan

ROOMY = 1e12
EXAMPLES = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
seeds = st.integers(1000, 10_000)


def uniform(layers, *speeds, memory_bytes=ROOMY, link=math.inf, **more):
    """Layers of one second, one byte of output each."""
    devices = tuple(
        Device(f"d{i}", (1.0 / s,) * layers, (2.0 / s,) * layers, memory_bytes, link)
        for i, s in enumerate(speeds)
    )
    return Problem((Layer("", 1, 1, 0),) * layers, devices, **more)


def time_s(problem):
    """Of the best plan; infinite where nothing fits."""
    optimum = optimise(Solver(problem), math.inf)
    return math.inf if optimum is None else optimum.best.time_s


def no_slower(changed, problem):
    return time_s(changed) <= time_s(problem) * (1 + 1e-9)


def priced(problem, placement):
    """What brute force says of a plan: its bottleneck and fill."""
    devices = {device.name: device for device in problem.devices}
    stages = [(devices[n], r.start, r.stop) for n, r in placement.assigned]
    return price(problem, stages)


@pytest.mark.parametrize("part", range(5))
def test_the_plan_is_the_best_of_all_placements(part):
    unfit, bound_by, both_ends, gaps = 0, [], 0, 0
    for seed in range(100 * part, 100 * part + 100):
        problem = random_problem(seed)
        expected = best(problem)
        optimum = optimise(Solver(problem), math.inf)
        assert (expected is None) == (optimum is None), seed
        if optimum is None:
            unfit += 1
            continue
        placement = optimum.best
        assert placement.time_s == pytest.approx(expected[0], rel=1e-9), seed
        assert priced(problem, placement) == pytest.approx(
            (placement.bottleneck_s, placement.fill_s), rel=1e-9
        ), seed
        assert optimum.bound_s <= expected[0] * (1 + 1e-9), seed
        if not problem.broker_limited:
            assert optimum.gap == 0.0, seed
            assert placement.fill_s == pytest.approx(expected[1], rel=1e-9), seed
        gaps += optimum.gap > 0.0
        bound_by.append(placement.bound_by.split()[0])
        names = placement.devices
        both_ends += len(names) > 1 and names[0] == names[-1]
    assert 5 < unfit < 35  # every kind of outcome was put to the test
    assert bound_by.count("the") > 3  # a link or the broker
    assert both_ends > 1
    assert gaps < 3


@pytest.mark.parametrize("rate", [100.0, 1000.0])
def test_a_slow_broker_is_planned_for_too(rate):
    for seed in range(80):
        problem = replace(random_problem(seed), topology="broker", broker_bytes_per_s=rate)
        expected = best(problem)
        optimum = optimise(Solver(problem), math.inf)
        if optimum is None:
            assert expected is None, seed
            continue
        assert optimum.best.time_s == pytest.approx(expected[0], rel=1e-9), seed
        assert optimum.bound_s <= expected[0] * (1 + 1e-9), seed
        assert optimum.gap < 0.1, seed


@EXAMPLES
@given(seeds, st.integers(0, 4), st.floats(1.0, 5.0))
def test_more_memory_never_hurts(seed, which, factor):
    problem = random_problem(seed)
    devices = list(problem.devices)
    device = devices[which % len(devices)]
    bigger = replace(device, memory_bytes=device.memory_bytes * factor)
    devices[which % len(devices)] = bigger
    assert no_slower(replace(problem, devices=tuple(devices)), problem)


@EXAMPLES
@given(seeds, st.integers(0, 4), st.floats(1.0, 5.0))
def test_a_faster_device_or_link_never_hurts(seed, which, factor):
    problem = random_problem(seed)
    devices = list(problem.devices)
    device = devices[which % len(devices)]
    devices[which % len(devices)] = replace(
        device,
        forward_s=tuple(t / factor for t in device.forward_s),
        backward_s=tuple(t / factor for t in device.backward_s),
        link_bytes_per_s=device.link_bytes_per_s * factor,
        latency_s=device.latency_s / factor,
    )
    assert no_slower(replace(problem, devices=tuple(devices)), problem)


@EXAMPLES
@given(seeds, seeds)
def test_one_more_device_never_hurts(seed, other):
    problem = random_problem(seed)
    rng = np.random.default_rng(other)
    count = len(problem.layers)
    extra = Device(
        "extra",
        tuple(map(float, rng.uniform(0.1, 2.0, count))),
        tuple(map(float, rng.uniform(0.1, 2.0, count))),
        float(rng.integers(10, 2000)),
        float(rng.uniform(10.0, 1000.0)),
    )
    more = replace(problem, devices=(*problem.devices, extra))
    assert no_slower(more, problem)


@EXAMPLES
@given(seeds, st.randoms(use_true_random=False))
def test_the_order_of_the_devices_does_not_matter(seed, random):
    problem = random_problem(seed)
    devices = list(problem.devices)
    random.shuffle(devices)
    first = optimise(Solver(problem), math.inf)
    again = optimise(Solver(replace(problem, devices=tuple(devices))), math.inf)
    assert (first and first.best) == (again and again.best)


@EXAMPLES
@given(seeds)
def test_equal_devices_may_be_taken_for_unlike_ones(seed):
    problem = random_problem(seed)
    # Memory beyond what all layers need changes no plan, but makes each a type.
    apart = tuple(
        replace(d, memory_bytes=d.memory_bytes + 1e-6 * i)
        for i, d in enumerate(problem.devices)
    )
    assert time_s(replace(problem, devices=apart)) == pytest.approx(time_s(problem))


@EXAMPLES
@given(seeds)
def test_a_bound_from_merged_types_holds_and_its_plan_is_real(seed):
    problem = random_problem(seed)
    exact = optimise(Solver(problem), math.inf)
    near = approximate(problem, exact_limit=1.0, work_limit=1e9)
    if exact is None or near is None:
        assert exact is not None or near is None
        return
    best_s = exact.best.time_s
    assert near.bound_s <= best_s * (1 + 1e-9)
    assert near.best.time_s >= best_s * (1 - 1e-9)
    assert near.best.time_s * (1 - near.gap) <= best_s * (1 + 1e-9)
    assert evaluate(problem, near.best.assigned) == near.best


def test_exchanges_find_the_optimum_of_small_fleets():
    missed = []
    for seed in range(100):
        problem = random_problem(seed)
        exact = optimise(Solver(problem), math.inf)
        near = approximate(problem, exact_limit=1.0, work_limit=1e9)
        if exact is not None:
            missed.append(
                1.0 if near is None else near.best.time_s / exact.best.time_s - 1.0
            )
    assert np.mean(np.array(missed) < 1e-6) > 0.8
    assert np.mean(missed) < 0.1


def test_many_unlike_devices_are_planned_with_a_gap():
    rng = np.random.default_rng(0)
    speeds = rng.uniform(0.5, 3.0, 20)
    problem = uniform(60, *map(float, speeds), objective="inference")
    assert exact_work(problem) > 1e7
    solution = plan(problem)
    # Whole layers of one second: no even split, but none beats the sum of the speeds.
    assert solution.placement.bottleneck_s >= 60 / sum(speeds)
    assert 0.0 <= solution.gap < 0.35
    assert solution.placement.time_s * (1 - solution.gap) >= 60 / sum(speeds) * (1 - 1e-9)


def test_a_slow_link_moves_the_cut_to_the_thin_place():
    layers = tuple(Layer("", 1, size) for size in (800, 800, 8, 800))
    fast = uniform(4, 1, 1, microbatches=100)
    fast = replace(fast, layers=layers)
    assert plan(fast).placement.stages[0].layers == range(2)
    slow = replace(
        fast, devices=tuple(replace(d, link_bytes_per_s=10.0) for d in fast.devices)
    )
    placement = plan(slow).placement
    assert [stage.layers for stage in placement.stages] == [range(3), range(3, 4)]


def test_a_gentle_slow_device_is_left_out_and_told_why():
    problem = uniform(4, 1, 1, 0.1, microbatches=8)
    solution = plan(problem)
    assert sorted(solution.placement.devices) == ["d0", "d1"]
    ((name, reason),) = solution.left_out
    assert name == "d2"
    assert reason == "with it the step would take 249 s instead of 54 s"
    tiny = replace(problem.devices[2], memory_bytes=0.5)
    solution = plan(replace(problem, devices=(*problem.devices[:2], tiny)))
    assert "too little for any layer" in solution.left_out[0][1]
    unable = replace(problem.devices[2], forward_s=(math.inf,) * 4)
    solution = plan(replace(problem, devices=(*problem.devices[:2], unable)))
    assert solution.left_out[0][1] == "it cannot run any layer"


def test_more_devices_than_a_wide_layer_can_use_are_left_out():
    problem = uniform(2, 1, 1, 1, objective="inference")
    solution = plan(problem)
    assert solution.left_out == (
        ("d2", "no placement with it fits (it equals d0, which has a stage)"),
    )


def test_alternatives_are_a_front_from_the_best_on():
    rng = np.random.default_rng(3)
    problem = uniform(20, *map(float, rng.uniform(0.3, 2, 5)), microbatches=6)
    solution = plan(replace(problem, hop_overhead_s=0.5))
    times = [placement.time_s for placement in solution.alternatives]
    assert solution.alternatives[0] == solution.placement
    assert times == sorted(times)
    front = sorted((p.bottleneck_s, p.fill_s) for p in solution.alternatives)
    assert [fill for _, fill in front] == sorted((f for _, f in front), reverse=True)


def test_a_device_at_both_ends_runs_two_stages():
    problem = uniform(6, 1, 1, microbatches=50, pin_first="d0", pin_last="d0", stages=3)
    placement = plan(problem).placement
    assert placement.devices == ("d0", "d1", "d0")
    first, middle, last = (len(stage.layers) for stage in placement.stages)
    assert first + last == middle == 3
    assert placement.bottleneck_s == pytest.approx(9.0)
    alone = plan(replace(problem, devices=problem.devices[:1], stages=None)).placement
    assert alone.devices == ("d0",)


def test_a_fixed_order_is_cut_exactly():
    problem = uniform(6, 1, 2, objective="inference")
    found = Solver(problem, order=["d1", "d0"]).least(LOAD)
    assert found.assigned == (("d1", range(4)), ("d0", range(4, 6)))


def test_recompute_is_used_only_where_memory_asks_for_it():
    layers = (Layer("", 10, 1, stash_bytes=30),) * 4
    problem = replace(uniform(4, 1, 1, microbatches=8), layers=layers)
    devices = tuple(replace(d, memory_bytes=100) for d in problem.devices)
    problem = replace(problem, devices=devices, options=("plain", "recompute"), stages=2)
    placement = plan(problem).placement
    assert [stage.option for stage in placement.stages] == ["recompute", "plain"]
    assert placement.stages[0].memory_bytes == 2 * 10 + 2 * 30 + 2 * 0
    with pytest.raises(PlanError, match=r"short by .*[Rr]ecompute.* would fit"):
        plan(replace(problem, options=("plain",)))
