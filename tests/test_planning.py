"""What a run leaves open is chosen for its devices, and chosen anew as they change."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from coordinator.assignment import Assignment
from coordinator.plan_run import planner_of
from coordinator.profile_cache import ProfileCache
from coordinator.settle import for_fleet
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.stash import Keep
from edgetrain.errors import PlanError
from edgetrain.sim.fleet import SimDevice
from edgetrain.wire.messages import Ready
from tests.plan_task import LAYERS, chain_job, hello, planner, write_chain

FLEET = {"devices": ["a", "b", "c"]}


def layers_of(assignment: Assignment) -> dict[str, int]:
    """How many each device has."""
    return dict(zip(assignment.devices, map(len, assignment.layers), strict=True))


def test_a_device_that_would_slow_the_run_gets_no_stage(tmp_path):
    job = chain_job(tmp_path, fleet=FLEET)
    found = planner(job, hello("a"), hello("b"), hello("c", 1e6)).assign()
    assert set(found.devices) == {"a", "b"}
    assert "c" in found.left_out


def test_all_devices_get_a_stage_where_that_is_asked(tmp_path):
    job = chain_job(tmp_path, fleet=FLEET, plan={"stages": "all"})
    found = planner(job, hello("a"), hello("b"), hello("c", 1e7)).assign()
    assert set(found.devices) == {"a", "b", "c"}
    assert layers_of(found)["c"] == 1


def test_a_model_that_is_soonest_done_on_one_device_stays_there(tmp_path):
    job = chain_job(tmp_path, fleet=FLEET)
    found = planner(job, hello("a", 1e13), hello("b", 1e13), hello("c", 2e13)).assign()
    assert found.devices == ("c",)


def test_as_many_microbatches_as_make_the_shortest_step(tmp_path):
    auto = {"microbatches": "auto"}
    job = chain_job(tmp_path, fleet=FLEET, train=auto)
    slow = {name: hello(name, 1e8) for name in "abc"}
    many = for_fleet(job, slow)
    assert many.config.train.microbatches > 4
    fast = {name: hello(name, 1e13) for name in "abc"}
    assert for_fleet(job, fast).config.train.microbatches == 1
    fixed = chain_job(tmp_path, fleet=FLEET, train={"microbatches": 2})
    assert for_fleet(fixed, slow) is fixed


def test_stages_recompute_only_where_they_would_not_fit(tmp_path):
    train = {"microbatches": 8, "batch_size": 1024}
    job = chain_job(tmp_path, fleet=FLEET, train=train)
    roomy = planner(job, hello("a"), hello("b"), hello("c")).assign()
    assert set(roomy.keeps) == {Keep.LEAST}
    most = max(roomy.memory_bytes)
    tight = [hello(n, memory_bytes=int(0.9 * most)) for n in "abc"]
    found = planner(job, *tight).assign()
    assert max(found.memory_bytes) <= 0.9 * most
    assert Keep.INPUTS in found.keeps or found.schedule != roomy.schedule


def test_a_model_too_large_for_all_is_refused_with_what_would_help(tmp_path):
    job = chain_job(tmp_path, fleet=FLEET)
    tiny = [hello(n, memory_bytes=400_000) for n in "abc"]
    with pytest.raises(PlanError, match=r"short"):
        planner(job, *tiny).assign()


def test_what_stages_take_moves_the_next_plan(tmp_path):
    job = chain_job(tmp_path, fleet=FLEET)
    mine = planner(job, hello("a"), hello("b"), hello("c"))
    first = mine.assign()
    assert len(first.devices) == 3
    pairs = zip(first.devices, mine.predict(first).times, strict=True)
    slowed = [4 * t.compute_s * (4 if name == "b" else 1) for name, t in pairs]
    mine.observe(first, slowed)
    second = mine.assign()
    assert layers_of(second).get("b", 0) < layers_of(first)["b"]
    assert mine.step_s(second) < mine.step_s(first)


def test_both_ends_on_the_device_that_has_the_data(tmp_path):
    pins = {"pin": {"first": "a", "last": "a"}, "stages": 3}
    job = chain_job(tmp_path, fleet=FLEET, plan=pins)
    found = planner(job, hello("a"), hello("b"), hello("c", 1e7)).assign()
    assert found.devices == ("a", "b", "a")
    assert sum(map(len, found.layers)) == LAYERS + 1


def weights(path) -> dict[str, np.ndarray]:
    return dict(normalise(onnx.load(path), batch=1).weights)


def test_a_device_with_both_ends_trains_to_the_weights_of_one_alone(
    edgetrain_fleet, tmp_path
):
    write_chain(tmp_path)
    fleet = edgetrain_fleet([SimDevice("a"), SimDevice("b")])
    table = {
        "model": {"path": "chain.onnx"},
        "data": {"train": "train.npz"},
        "train": {"batch_size": 64, "steps": 6, "lr": 0.1, "microbatches": 4},
    }
    both = {"plan": {"pin": {"first": "a", "last": "a"}, "stages": 3}}
    split = fleet.train(table | both)
    assert [row.device for row in split.rows] == ["a", "b", "a"]
    alone = fleet.train(table | {"plan": {"stages": 1}})
    found, expected = weights(split.model), weights(alone.model)
    for name, value in expected.items():
        error = np.linalg.norm(found[name] - value)
        assert error <= 1e-6 * np.linalg.norm(value), name


def test_the_next_run_predicts_by_what_the_last_one_measured(tmp_path):
    cache = ProfileCache(tmp_path / "cache")
    job = chain_job(tmp_path, fleet={"devices": ["a", "b"]}, plan={"stages": "all"})
    devices = {name: hello(name) for name in "ab"}
    first = planner_of(job, devices, cache)
    plan = first.assign()
    before = first.predict(plan).times
    ready = [Ready(1, 0, n, 0.05, 0.2, 1000) for n in range(2)]
    first.improve(plan, ready)
    again = planner_of(job, devices, cache)
    for times in again.predict(plan).times:
        assert (times.forward_s, times.backward_s) == (0.05, 0.2)
    other = chain_job(tmp_path, fleet={"devices": ["a", "b"]}, train={"microbatches": 2})
    learnt = planner_of(other, devices, cache).predict(plan).times
    fresh = planner_of(other, devices).predict(plan).times
    assert learnt[0].compute_s > 2 * fresh[0].compute_s, "the device is known to be slower"
    assert before[0].compute_s < 0.25
