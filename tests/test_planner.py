"""The planner against brute force."""

from __future__ import annotations

import math

import pytest
from brute_placement import best, random_problem

from edgetrain.planner.exact import ExactSolver
from edgetrain.planner.search import optimise


def test_the_plan_is_the_best_of_all_placements():
    for seed in range(500):
        problem = random_problem(seed)
        if problem.topology == "broker" and math.isfinite(problem.broker_bytes_per_s):
            continue
        expected = best(problem)
        optimum = optimise(ExactSolver(problem), 1e12)
        assert (expected is None) == (optimum is None), seed
        if optimum is not None:
            assert optimum.gap == 0.0, seed
            assert optimum.best.time_s == pytest.approx(expected[0], rel=1e-9), seed
