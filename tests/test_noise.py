"""Noise: the same bits everywhere, N(0, 1), and independent from key to key."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.runtime.estimators.noise import NoiseKey, from_words, normal, signs

KEY = NoiseKey(seed=7, step=11, microbatch=2, layer=3, k=1)
FIELDS = ("seed", "step", "microbatch", "layer", "k")
COUNT = 200_000
GOLDEN_FIRST = [
    "0x1.34ead20000000p-5",
    "-0x1.5c94660000000p-1",
    "0x1.d659e60000000p-1",
    "-0x1.1d6b940000000p-1",
]
GOLDEN_SHA256 = "26625e17fcff3e9130fa3380033bc46cd4d6a1487c458441a6a674c7f84fb1dc"


def test_golden_bits():
    assert [x.hex() for x in normal(KEY, (4,)).tolist()] == GOLDEN_FIRST
    data = normal(KEY, (100_003,)).astype("<f4").tobytes()
    assert hashlib.sha256(data).hexdigest() == GOLDEN_SHA256


def test_it_is_the_inverse_distribution_function():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 5000, dtype=np.uint32)
    edges = [0, 1, 2, 3, 2**32 - 1, 2**32 - 2, 0x26666666, 0x26666667]
    words = np.concatenate([words, np.array(edges, np.uint32)])
    exact = NormalDist()
    for word, z in zip(words.tolist(), from_words(words).tolist(), strict=True):
        upper = -exact.inv_cdf(((word >> 1) + 0.5) / 2**32)
        assert z == pytest.approx(-upper if word & 1 else upper, rel=2e-6, abs=2e-6)


def test_distribution():
    z = np.sort(normal(KEY, (COUNT,)).astype(np.float64))
    assert abs(z.mean()) < 4 / math.sqrt(COUNT)
    assert abs(z.var() - 1.0) < 4 * math.sqrt(2 / COUNT)
    cdf = np.array([NormalDist().cdf(x) for x in z[:: COUNT // 1000]])
    empirical = np.arange(0, COUNT, COUNT // 1000) / COUNT
    assert np.abs(cdf - empirical).max() < 1.95 / math.sqrt(COUNT)  # Kolmogorov, p = 0.001


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("by", [1, 2, 2**31])
def test_keys_that_differ_anywhere_are_independent(field, by):
    other = replace(KEY, **{field: getattr(KEY, field) + by})
    a, b = normal(KEY, (COUNT,)), normal(other, (COUNT,))
    for left, right in ((a, b), (a[1:], b[:-1]), (a * a - 1, b * b - 1)):
        correlation = np.corrcoef(left, right)[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(COUNT)


def test_swapped_fields_are_another_key():
    keys = {
        NoiseKey(*(1 if n == one else 0 for n in range(len(FIELDS))))
        for one in range(len(FIELDS))
    }
    draws = {normal(key, (8,)).tobytes() for key in keys}
    assert len(draws) == len(FIELDS)


def test_draws_do_not_correlate_with_their_neighbours():
    z = normal(KEY, (COUNT,))
    for lag in (1, 2, 3, 4, 8):
        assert abs(np.corrcoef(z[lag:], z[:-lag])[0, 1]) < 4.5 / math.sqrt(COUNT)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(count=st.integers(0, 40_000), more=st.integers(0, 40_000))
def test_a_prefix_does_not_depend_on_the_length(count, more):
    long = normal(KEY, (count + more,))
    np.testing.assert_array_equal(long[:count], normal(KEY, (count,)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(-(2**70), 2**70), shape=st.lists(st.integers(0, 4), max_size=4))
def test_any_seed_and_shape(seed, shape):
    z = normal(NoiseKey(seed, step=0), tuple(shape))
    assert z.shape == tuple(shape)
    assert z.dtype == np.float32
    np.testing.assert_array_equal(z, normal(NoiseKey(seed % 2**64, step=0), tuple(shape)))
    assert np.isfinite(z).all()


def test_signs_are_fair_independent_and_the_same_everywhere():
    z = signs(KEY, (COUNT,))
    assert set(np.unique(z)) == {-1.0, 1.0}
    assert abs(z.mean()) < 4 / math.sqrt(COUNT)
    assert z[:16].tolist() == [
        -1, 1, -1, -1, -1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1
    ]  # fmt: skip
    for field in FIELDS:
        other = signs(replace(KEY, **{field: getattr(KEY, field) + 1}), (COUNT,))
        assert abs((z * other).mean()) < 4 / math.sqrt(COUNT)


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_first_signs_do_not_depend_on_how_many_are_drawn(few, more):
    few, more = sorted((few, more))
    assert np.array_equal(signs(KEY, (more,))[:few], signs(KEY, (few,)))
