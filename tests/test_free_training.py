"""Stages without a backward graph train on real agents, beside exact ones.

The bars are those of the measured reference of each mode, less its spread; seeds are fixed.
What a run reached is printed with ``pytest -s``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from free_data import HELD_OUT_PEOPLE, watch_pretraining
from free_runs import trained
from free_tasks import (
    Task,
    digits_mlp,
    mnist_deep_mlp,
    mnist_inverted,
    mnist_mlp,
    mnist_mobilenet,
    mnist_rotated,
    watch_mobilenet,
    watch_transformer,
)

from edgetrain.estimator_spec import DEFAULT, EstimatorSpec

ONE = EstimatorSpec(1)
HYBRID = ("hybrid", "vjp")
CARRIED = ("forward_gradient", "forward_gradient")


def reached(
    task: Task,
    folder: Path,
    cut: str,
    modes: Sequence[str],
    estimator: EstimatorSpec = DEFAULT,
    **changes: object,
) -> float:
    cuts = task.cuts[cut] if cut else ()
    place = folder / "-".join((cut, *modes))
    accuracy = trained(task, place, cuts, modes, estimator, **changes)
    print(f"{cut} {'/'.join(modes)}: {accuracy:.4f}")  # noqa: T201 - shown with pytest -s
    return accuracy


@pytest.mark.parametrize("form", ["jvp", "forward"])
def test_digits_before_an_exact_layer(form: str, tmp_path: Path) -> None:
    estimator = EstimatorSpec(1, form=form)
    assert reached(digits_mlp(300), tmp_path, "last", HYBRID, estimator) >= 0.965


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The digits MLP after 300 steps by each estimate: accuracy, mean of three seeds."""
    folder = tmp_path_factory.mktemp("digits")
    weights = EstimatorSpec(4, noise="weights")
    ways = {
        "hybrid": ("last", HYBRID, ONE),
        "local": ("last", ("local", "vjp"), ONE),
        "forward_gradient": ("last", CARRIED, ONE),
        "weights": ("last", CARRIED, weights),
    }
    return {
        name: float(
            np.mean(
                [
                    reached(digits_mlp(300), folder / f"{name}{seed}", *way, seed=seed)
                    for seed in range(3)
                ]
            )
        )
        for name, way in ways.items()
    }


def test_digits_by_every_estimate(digits: dict[str, float]) -> None:
    assert digits["hybrid"] >= 0.965
    assert digits["local"] >= 0.96
    assert digits["forward_gradient"] >= 0.95


def test_what_is_known_of_the_cotangent_decides(digits: dict[str, float]) -> None:
    """Exact at the cut beats the loss's alone, and noise in activities noise in weights."""
    assert digits["hybrid"] > digits["forward_gradient"] > digits["weights"]


LONG = {
    "hybrid": ("last", HYBRID, ONE, 0.973),
    "local": ("last", ("local", "vjp"), ONE, 0.973),
    "forward_gradient": ("last", CARRIED, ONE, 0.973),
    "weights": ("", CARRIED[:1], EstimatorSpec(4, noise="weights"), 0.94),
    "spsa": ("", ("spsa",), EstimatorSpec(16), 0.88),
}


@pytest.mark.parametrize("name", LONG)
def test_digits_for_longer(name: str, tmp_path: Path) -> None:
    cut, modes, estimator, bar = LONG[name]
    found = reached(digits_mlp(1500), tmp_path, cut, modes, estimator, microbatches=1)
    assert found >= bar


def test_the_last_block_and_the_head_learn_from_scalars(tmp_path: Path) -> None:
    """What is trained where nothing is said: the default of such runs."""
    task = mnist_rotated()
    found = reached(task, tmp_path, "", ("forward_gradient",), ONE, trainable=None)
    assert found >= 0.89


def test_rotated_digits_by_a_head_at_the_cut(tmp_path: Path) -> None:
    modes = ("local", "vjp")
    assert reached(mnist_rotated(), tmp_path, "convolutions", modes, ONE) >= 0.875


def test_tensor_trains_learn_from_the_loss_alone(tmp_path: Path) -> None:
    found = reached(
        mnist_mlp(2000),
        tmp_path,
        "",
        ("spsa",),
        EstimatorSpec(8),
        trainable="tt:r=8",
        microbatches=1,
    )
    assert found >= 0.89


@pytest.mark.parametrize("cut", ["convolutions", "hidden"])
def test_rotated_digits(cut: str, tmp_path: Path) -> None:
    """A pretrained convolutional net adapts as well as with exact gradients."""
    task = mnist_rotated()
    exact = reached(task, tmp_path, cut, ("vjp", "vjp"))
    estimated = reached(task, tmp_path, cut, HYBRID)
    assert estimated >= 0.90
    assert estimated >= exact - 0.015


def test_inverted_digits(tmp_path: Path) -> None:
    """What has changed is at the sensor: the first layers must learn, or it stays bad."""
    task = mnist_inverted()
    frozen = reached(task, tmp_path, "convolutions", ("frozen", "vjp"))
    assert reached(task, tmp_path, "convolutions", HYBRID) >= max(0.88, frozen + 0.01)


def in_eight(task: Task) -> Task:
    """In so many microbatches, each with noise of its own."""
    return replace(task, recipe=msgspec.structs.replace(task.recipe, microbatches=8))


@pytest.mark.parametrize("tangents", [1, 4])
def test_integers_adapt_to_another_sensor(tangents: int, tmp_path: Path) -> None:
    """An engine of 8 bits trains the first layers as well as one of floats."""
    estimator = EstimatorSpec(tangents, noise="weights", quantised=True)
    task = in_eight(mnist_inverted())
    frozen = reached(task, tmp_path, "convolutions", ("frozen", "vjp"))
    adapted = reached(task, tmp_path, "convolutions", HYBRID, estimator)
    assert adapted >= max(0.88, frozen + 0.01)


def test_integers_adapt_to_turned_digits(tmp_path: Path) -> None:
    estimator = EstimatorSpec(1, noise="weights", quantised=True)
    task = in_eight(mnist_rotated())
    assert reached(task, tmp_path, "convolutions", HYBRID, estimator) >= 0.90


def test_the_middle_of_a_deep_net(tmp_path: Path) -> None:
    """The stage before it learns from the cotangent that it estimates."""
    task = mnist_deep_mlp()
    exact = reached(task, tmp_path, "middle", ("vjp", "vjp", "vjp"))
    assert reached(task, tmp_path, "middle", ("vjp", "hybrid", "vjp")) >= exact - 0.025


def test_from_scratch_on_statistics_of_the_first_samples(tmp_path: Path) -> None:
    estimator = EstimatorSpec(2)
    assert reached(mnist_mobilenet(), tmp_path, "first", HYBRID, estimator) >= 0.85


@pytest.fixture(scope="module")
def watches(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], float]:
    """The transformer on each held-out person: mean accuracy by cut and modes."""
    folder = tmp_path_factory.mktemp("watches")
    ways = [
        ("first", "vjp", "vjp"),
        ("first", "identity", "vjp"),
        ("middle", "vjp", "identity", "vjp"),
        ("first_two", "identity", "vjp"),
        ("first_two", "frozen", "vjp"),
        ("first_two", "local_vjp", "vjp"),
    ]
    return {
        (cut, *modes): float(
            np.mean(
                [
                    reached(watch_transformer(p), folder / str(p), cut, modes)
                    for p in HELD_OUT_PEOPLE
                ]
            )
        )
        for cut, *modes in ways
    }


def test_a_transformer_meets_a_person(watches: dict[tuple[str, ...], float]) -> None:
    exact = watches["first", "vjp", "vjp"]
    assert exact >= 0.925
    assert watches["first", "identity", "vjp"] >= 0.925
    assert watches["middle", "vjp", "identity", "vjp"] >= max(0.93, exact - 0.025)
    frozen = watches["first_two", "frozen", "vjp"]
    assert watches["first_two", "identity", "vjp"] >= frozen
    assert watches["first_two", "local_vjp", "vjp"] >= max(0.94, frozen + 0.015)


def test_a_convolutional_net_meets_a_person(tmp_path: Path) -> None:
    """Its first stage learns from a head that knows the people it was pretrained on."""
    source = watch_pretraining()
    found = [
        reached(
            watch_mobilenet(person),
            tmp_path / str(person),
            "first",
            ("local", "vjp"),
            ONE,
            source=source,
        )
        for person in HELD_OUT_PEOPLE
    ]
    assert np.mean(found) >= 0.935
