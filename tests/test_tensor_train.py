"""A tensor train is worth the matrix its formula says, and fits what it has room for."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import normal

from edgetrain.compiler.tensor_train import (
    TensorTrain,
    balanced,
    decompose,
    dense,
    draw,
    fit,
    merge,
)

factors = st.integers(1, 4)
trains = st.lists(st.tuples(factors, factors), min_size=1, max_size=4).flatmap(
    lambda pairs: st.integers(1, 9).map(
        lambda rank: TensorTrain.of("w", *zip(*pairs, strict=True), rank)
    )
)


def without_limit(train: TensorTrain) -> TensorTrain:
    """Of the ranks that any matrix of its shape needs."""
    return TensorTrain.of("w", train.rows, train.columns, math.prod(train.shape))


@given(st.integers(1, 3000))
def test_factors_are_as_even_as_they_can_be(extent):
    found = balanced(extent)
    assert math.prod(found) == extent
    assert list(found) == sorted(found)
    divisors = [d for d in range(1, extent + 1) if extent % d == 0]
    least = min(
        sum(three) + extent // math.prod(three)
        for three in itertools.combinations_with_replacement(divisors, 3)
        if extent % math.prod(three) == 0
    )
    assert sum(found) == least


def test_a_layer_of_digits_has_the_cores_of_the_literature():
    train = fit("w", (784, 128), 8)
    assert (train.rows, train.columns) == ((4, 7, 7, 4), (4, 4, 4, 2))
    assert list(train.cores) == ["tt/w/0", "tt/w/1", "tt/w/2", "tt/w/3"]
    assert train.elements == 3904 - 128
    assert train.pays


@pytest.mark.parametrize("shape", [(997, 127), (127, 128), (128, 127), (2048, 3)])
def test_large_prime_factors_leave_room_to_gain(shape):
    train = fit("w", shape, 8)
    assert train.shape == shape
    assert train.pays


def test_two_primes_are_the_product_of_two_matrices():
    assert set(fit("w", (997, 127), 8).cores.values()) == {
        (1, 997, 1, 8),
        (8, 1, 127, 1),
    }


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 64))
def test_no_rank_is_larger_than_it_can_be_used(rows, columns, rank):
    train = fit("w", (rows, columns), rank)
    assert train.shape == (rows, columns)
    assert train.ranks[0] == train.ranks[-1] == 1
    for before, m, n, after in train.cores.values():
        assert after <= before * m * n
        assert before <= m * n * after
        assert max(before, after) <= rank


@given(trains, st.integers(0, 99))
def test_an_element_is_the_product_of_one_matrix_a_core(train, seed):
    cores = draw(train, 1.0, np.random.default_rng(seed))
    whole = merge(train, cores).reshape(*train.rows, *train.columns)
    count = len(cores)
    for index in itertools.islice(np.ndindex(whole.shape), 0, None, 7):
        product = np.eye(1)
        for core, i, j in zip(cores, index[:count], index[count:], strict=True):
            product = product @ core[:, i, j, :].astype(np.float64)
        assert whole[index] == pytest.approx(product.item(), rel=1e-5, abs=1e-6)


@given(trains, st.integers(0, 99))
def test_with_all_ranks_any_matrix_comes_back(train, seed):
    train = without_limit(train)
    matrix = normal(*train.shape, seed=seed)
    cores = decompose(matrix, train)
    assert [core.shape for core in cores] == list(train.cores.values())
    np.testing.assert_allclose(merge(train, cores), matrix, atol=1e-5)


@given(trains, st.integers(0, 99))
def test_with_fewer_it_is_as_close_as_the_singular_values_allow(train, seed):
    matrix = normal(*train.shape, seed=seed)
    error = np.linalg.norm(merge(train, decompose(matrix, train)) - matrix) ** 2
    count = len(train.rows)
    pairs = [axis for k in range(count) for axis in (k, count + k)]
    tensor = matrix.reshape(*train.rows, *train.columns).transpose(pairs)
    sizes = [m * n for m, n in zip(train.rows, train.columns, strict=True)]
    left_out = 0.0
    for k, rank in enumerate(train.ranks[1:-1], start=1):
        unfolded = tensor.reshape(math.prod(sizes[:k]), -1).astype(np.float64)
        left_out += np.sum(np.linalg.svd(unfolded, compute_uv=False)[rank:] ** 2)
    assert error <= left_out + 1e-6 * matrix.size


def test_a_train_comes_back_as_it_was():
    """Its matrix has no more than its ranks, so that nothing is cut off."""
    train = fit("w", (64, 64), 3)
    matrix = merge(train, draw(train, 1.0, np.random.default_rng(5)))
    np.testing.assert_allclose(merge(train, decompose(matrix, train)), matrix, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_cores_of_a_matrix_are_all_of_one_size(scale):
    train = fit("w", (64, 64), 4)
    cores = decompose(scale * normal(64, 64), train)
    sizes = [np.sqrt(np.mean(core**2)) for core in cores]
    np.testing.assert_allclose(sizes, sizes[0], rtol=1e-5)


def test_of_nothing_but_zeros_only_the_last_core_is_zero():
    """The others still pass it a gradient."""
    train = fit("w", (64, 64), 4)
    *others, last = decompose(np.zeros((64, 64), np.float32), train)
    assert not last.any()
    assert all(core.any() for core in others)


@pytest.mark.parametrize("rank", [1, 4, 8])
@pytest.mark.parametrize("shape", [(784, 128), (128, 784), (997, 127)])
def test_drawn_weights_have_the_deviation_asked_for(shape, rank):
    train = fit("w", shape, rank)
    drawn = [
        merge(train, draw(train, 0.05, np.random.default_rng(seed))) for seed in range(40)
    ]
    assert np.sqrt(np.mean(np.square(drawn))) == pytest.approx(0.05, rel=0.15)


def test_merging_keeps_all_other_weights():
    train = fit("w", (64, 64), 2)
    cores = draw(train, 1.0, np.random.default_rng(0))
    bias = normal(64)
    held = {**dict(zip(train.cores, cores, strict=True)), "b": bias}
    merged = dense(held, [train])
    assert merged.keys() == {"w", "b"}
    assert merged["b"] is bias
    assert np.array_equal(merged["w"], merge(train, cores))
