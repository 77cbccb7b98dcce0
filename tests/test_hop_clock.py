"""Hop times come out right however far the stages' clocks are apart."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.hop_clock import HopClock

SECONDS = st.floats(0, 10)
TRIPS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=8)


@given(TRIPS, st.floats(-1e3, 1e3), st.floats(-1e3, 1e3))
def test_both_ways_together_need_no_common_clock(trips, near_offset_s, far_offset_s):
    near, far = HopClock(), HopClock()
    for m, (left_s, down_s, held_s, up_s) in enumerate(trips):
        tick = Tick(3, m)
        near.left(tick, left_s + near_offset_s)
        far.arrived(tick, left_s + down_s + far_offset_s)
        far.answered(tick, left_s + down_s + held_s + far_offset_s)
        near.returned(tick, left_s + down_s + held_s + up_s + near_offset_s)
    hops_s = near.take().away_s - far.take().turnaround_s
    assert math.isclose(hops_s, sum(d + u for _, d, _, u in trips), abs_tol=1e-9)


def test_sums_start_anew_and_what_is_under_way_stays():
    clock = HopClock()
    clock.left(Tick(0, 0), 1.0)
    clock.left(Tick(0, 1), 2.0)
    clock.returned(Tick(0, 0), 4.0)
    assert clock.take() == (3.0, 0.0)
    assert clock.take() == (0.0, 0.0)
    clock.returned(Tick(0, 1), 7.0)
    assert clock.take() == (5.0, 0.0)


def test_what_was_never_answered_is_forgotten_with_its_step():
    clock = HopClock()
    clock.left(Tick(0, 0), 1.0)
    clock.arrived(Tick(0, 0), 1.0)
    clock.left(Tick(1, 0), 2.0)
    clock.forget(1)
    clock.returned(Tick(0, 0), 9.0)
    clock.answered(Tick(0, 0), 9.0)
    assert clock.take() == (0.0, 0.0)
    clock.returned(Tick(1, 0), 3.0)
    assert clock.take() == (1.0, 0.0)
