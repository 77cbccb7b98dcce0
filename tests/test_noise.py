"""Noise: the same bits everywhere, fair, and independent from key to key."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.runtime.estimators.noise import NoiseKey, signs

KEY = NoiseKey(seed=7, step=11, microbatch=2, layer=3, k=1)
FIELDS = ("seed", "step", "microbatch", "layer", "k")
COUNT = 200_000
GOLDEN_FIRST = "-+----+------+-+"
GOLDEN_SHA256 = "a30b466e6878e55d95f693b323adc8b4ec45334ce5f7a5c1619d07fb4527343f"


def test_golden_bits():
    assert "".join("+" if x > 0 else "-" for x in signs(KEY, (16,))) == GOLDEN_FIRST
    data = signs(KEY, (100_003,)).astype("<f4").tobytes()
    assert hashlib.sha256(data).hexdigest() == GOLDEN_SHA256


def test_they_are_fair_and_nothing_else():
    z = signs(KEY, (COUNT,))
    assert set(np.unique(z)) == {-1.0, 1.0}
    assert abs(z.mean()) < 4 / math.sqrt(COUNT)
    for lag in (1, 2, 32, 64, 127):
        assert abs((z[lag:] * z[:-lag]).mean()) < 4 / math.sqrt(COUNT)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("by", [1, 2, 2**31])
def test_keys_that_differ_anywhere_are_independent(field, by):
    other = replace(KEY, **{field: getattr(KEY, field) + by})
    a, b = signs(KEY, (COUNT,)), signs(other, (COUNT,))
    for left, right in ((a, b), (a[1:], b[:-1]), (a[64:], b[:-64])):
        assert abs((left * right).mean()) < 4 / math.sqrt(COUNT)


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_first_do_not_depend_on_how_many_are_drawn(few, more):
    few, more = sorted((few, more))
    assert np.array_equal(signs(KEY, (more,))[:few], signs(KEY, (few,)))


@given(st.lists(st.integers(0, 5), max_size=4))
def test_any_shape(shape):
    z = signs(KEY, tuple(shape))
    assert (z.shape, z.dtype) == (tuple(shape), np.float32)


@pytest.mark.parametrize("number", [-1, 2**64, 2**80 + 1])
def test_any_integer_is_a_key(number):
    assert signs(NoiseKey(number, number, number, number, number), (3,)).shape == (3,)
