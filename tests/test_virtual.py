"""Fleets on the virtual clock: conditions do what they say, and large fleets are quick."""

from __future__ import annotations

import dataclasses

import pytest
from timeline_cases import balanced

from edgetrain.conditions import Conditions, Happening
from edgetrain.errors import PlanError
from edgetrain.planner.timeline import play
from edgetrain.planner.timeline_case import NETWORKS
from edgetrain.sim.virtual import rehearse

# 4 microbatches of 1 s forward and 2 s backward on 2 stages
STEP_S = 15.0


def test_no_conditions_change_nothing():
    case = balanced(2, 4)
    run = rehearse(case, {"d0": Conditions(), "d1": Conditions()}, 8)
    assert run.step_end_s == play(case, steps=8).step_end_s
    assert run.period_s(0, 7) == STEP_S
    assert run.killed is None


def test_a_device_that_throttles_slows_the_steps_from_then_on():
    table = (
        Happening(at_s=4 * STEP_S, speed=0.25),
        Happening(at_s=1000.0, speed=1.0),
    )
    run = rehearse(balanced(2, 4), {"d1": Conditions(timetable=table)}, 30)
    assert run.period_s(0, 3) == STEP_S
    assert run.period_s(5, 10) == 4 * 12.0 + 3.0
    assert run.period_s(26, 29) == STEP_S


def test_a_slow_device_is_slow_from_the_start():
    run = rehearse(balanced(2, 4), {"d0": Conditions(speed=0.5)}, 4)
    assert run.period_s(0, 3) == 4 * 6.0 + 1.0


def test_a_link_that_is_down_delays_one_step():
    case = balanced(2, 4, link=(100.0, float("inf")))
    table = (Happening(at_s=4 * STEP_S + 5.0, down_s=40.0),)
    conditions = Conditions(link="1 MB/s", timetable=table)
    usual = rehearse(case, {"d1": Conditions(link="1 MB/s")}, 8).step_end_s
    ends = rehearse(case, {"d1": conditions}, 8).step_end_s
    assert ends[3] == usual[3]
    assert 30.0 < ends[7] - usual[7] <= 40.0


def test_a_link_may_change_its_rate_and_be_unlimited_again():
    case = balanced(2, 4, link=(1e5, float("inf")))
    table = (Happening(at_s=60.0, link=1e4), Happening(at_s=500.0, link="unlimited"))
    run = rehearse(case, {"d1": Conditions(link="1 MB/s", timetable=table)}, 40)
    assert run.period_s(0, 2) < run.period_s(6, 7) > 4 * 10.0 > run.period_s(38, 39)
    assert run.period_s(38, 39) == STEP_S


def test_paced_devices_take_their_times_whatever_the_stages_say():
    conditions = dict.fromkeys(("d0", "d1"), Conditions(paced=(0.1, 0.3)))
    assert rehearse(balanced(2, 4), conditions, 4).period_s(1, 3) == pytest.approx(5 * 0.4)


def test_a_killed_device_ends_the_run():
    table = (Happening(at_s=100.0, kill=True),)
    run = rehearse(balanced(2, 4), {"d1": Conditions(timetable=table)}, 10)
    assert (run.killed, run.killed_at_s, len(run.step_end_s)) == ("d1", 100.0, 6)
    with pytest.raises(PlanError, match="steps 5 to 6 of 6"):
        run.period_s(5, 6)


def test_a_kill_after_the_end_is_none():
    table = (Happening(at_s=1000.0, kill=True),)
    run = rehearse(balanced(2, 4), {"d1": Conditions(timetable=table)}, 10)
    assert run.killed is None
    assert len(run.step_end_s) == 10


def test_two_hundred_devices_take_moments_and_repeat():
    case = balanced(
        200,
        4,
        "1f1b-eager",
        link=(64e3, 1e7),
        times=(5e-3, 1e-2),
        network=NETWORKS["mosquitto"],
    )
    conditions = {
        f"d{index}": Conditions(
            speed=1.0 - index % 5 / 10,
            link="100 Mbit/s",
            latency_s=1e-3,
            jitter_s=1e-3,
            loss=1e-3,
        )
        for index in range(200)
    }
    first, second = rehearse(case, conditions, 3), rehearse(case, conditions, 3)
    assert first.step_end_s == second.step_end_s
    other = rehearse(dataclasses.replace(case, seed=1), conditions, 1)
    assert first.step_end_s[0] != other.step_end_s[0]


def test_an_unknown_device_is_named():
    with pytest.raises(PlanError, match="'d7'"):
        rehearse(balanced(2, 4), {"d7": Conditions()}, 2)
