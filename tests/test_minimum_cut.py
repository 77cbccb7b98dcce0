"""The minimum cut against all cuts there are."""

from __future__ import annotations

import itertools

from hypothesis import given, seed, settings
from hypothesis import strategies as st

from edgetrain.compiler.minimum_cut import source_side

PLACES = range(6)
SOURCE, SINK = PLACES[0], PLACES[-1]
PAIRS = [(a, b) for a in PLACES for b in PLACES if a != b]


def cost(capacities, side) -> int:
    return sum(c for (a, b), c in capacities.items() if a in side and b not in side)


def all_sides():
    inner = PLACES[1:-1]
    for count in range(len(inner) + 1):
        for chosen in itertools.combinations(inner, count):
            yield frozenset({SOURCE, *chosen})


@seed(0)
@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(PAIRS), st.integers(0, 7), max_size=20))
def test_no_cut_is_cheaper_and_none_as_cheap_is_nearer_to_the_source(capacities):
    side = source_side(capacities, SOURCE, SINK)
    assert SOURCE in side
    assert SINK not in side
    costs = {other: cost(capacities, other) for other in all_sides()}
    assert costs[side] == min(costs.values())
    assert all(side <= other for other, c in costs.items() if c == costs[side])


def test_a_network_of_a_thousand_places_takes_no_recursion():
    edges = {(i, i + 1): 5 for i in range(3000)}
    edges[1500, 1501] = 2
    assert source_side(edges, 0, 3000) == frozenset(range(1501))
