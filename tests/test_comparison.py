"""A run's report sets what was predicted beside what was measured."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.comparison import STEP, Comparison, compare
from coordinator.tally import Tally
from edgetrain.plan import HopPlan, Plan, StagePlan
from edgetrain.sim.fleet import SimDevice
from edgetrain.wire.messages import StepDone
from tests.small_task import run_table, write_small_task

STAGE = StagePlan(0, "pi", ("h",), "vjp", "why", 1, 10, 0.1, 0.2, 1000)
PLAN = Plan(
    "hash",
    "1f1b",
    4,
    8,
    (STAGE, StagePlan(1, "laptop", (), "vjp", "why", 1, 10, 0.05, 0.1, 2000)),
    2.0,
    "why",
    hops=(HopPlan(64, 32, 0.25),),
)


def done(stage: int, **figures: float) -> StepDone:
    given = {"loss_sum": 0.0, "samples": 0, "seconds": 2.5, "compute_s": 1.5, **figures}
    memory = {"sent_bytes": 1, "stash_peak_bytes": 1, "memory_peak_bytes": 800}
    return StepDone(run=1, epoch=0, stage=stage, step=0, **given, **memory)


def test_step_stages_and_hops_are_compared():
    tally = Tally(2)
    tally.add(done(0, away_s=3.0))
    tally.add(done(1, turnaround_s=2.2, compute_s=0.5))
    found = {c.what: c for c in compare(PLAN, tally)}
    assert found[STEP] == Comparison(STEP, 2.0, 2.5)
    assert found[STEP].error == pytest.approx(-0.2)
    assert found["stage 0 on pi: compute"].predicted == pytest.approx(1.2)
    assert found["stage 0 on pi: compute"].measured == 1.5
    assert found["stage 1 on laptop: memory"].measured == 800
    hop = found["hop 0 to 1"]
    assert (hop.predicted, hop.measured) == (pytest.approx(1.0), pytest.approx(0.8))
    assert hop.cells == ("hop 0 to 1", "1.00 s", "800 ms", "+25%")


def test_a_hop_says_what_it_is_encoded_in():
    hops = (HopPlan(10_000, 3_000, 0.25, "int8", "topk:0.1"),)
    tally = Tally(2)
    tally.add(done(0, away_s=3.0))
    tally.add(done(1, turnaround_s=2.2))
    (hop,) = [
        c.what
        for c in compare(msgspec.structs.replace(PLAN, hops=hops), tally)
        if c.what.startswith("hop")
    ]
    sizes = "10.0 kB down, 3.00 kB up"
    assert hop == f"hop 0 to 1 as int8, back topk:0.1: {sizes} a microbatch"


def test_what_was_not_measured_is_left_out():
    assert compare(PLAN, Tally(2)) == ()
    tally = Tally(2)
    tally.add(done(0))
    tally.add(done(1))
    assert not [c for c in compare(PLAN, tally) if c.what.startswith("hop")]


def test_a_run_compares_its_plan_and_writes_it_down(edgetrain_fleet, tmp_path):
    write_small_task(tmp_path)
    table = run_table()
    table["train"] |= {"microbatches": 4}
    outcome = edgetrain_fleet([SimDevice("a"), SimDevice("b")]).train(table)
    whats = [c.what for c in outcome.comparisons]
    assert whats[0] == STEP == outcome.step.what
    assert "hop 0 to 1" in whats
    assert all(c.predicted > 0 and c.measured > 0 for c in outcome.comparisons)
    page = (outcome.folder / "report.html").read_text()
    assert "Predicted and measured" in page
    assert all(cell in page for c in outcome.comparisons for cell in c.cells)


def test_the_figures_of_another_plan_are_not_mixed_in():
    tally = Tally(2)
    tally.add(done(0, away_s=3.0))
    tally.add(done(1))
    tally.restart(1)
    assert tally.committed == 0
    assert tally.stages[0].steps == 0
