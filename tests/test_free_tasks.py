"""The tasks that backprop-free training is tested on are what their tests take them for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from free_data import HELD_OUT_PEOPLE, rotate, watch_pretraining
from free_runs import accuracy
from free_small import SMALL
from free_tasks import DATA, TASKS, Task, shipped, watch_mobilenet, watch_transformer

from edgetrain.compiler import reference
from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.grad import grad
from edgetrain.compiler.normalise import normalise

BATCH = 4
SHIPPED_BYTES = 1_500_000

# By task: parameters, samples to train and eval, and the bounds of the accuracy before.
FACTS = {
    "digits_mlp": (17_226, 1400, 397, (0.0, 0.2)),
    "mnist_rotated": (26_826, 1000, 2000, (0.40, 0.52)),
    "mnist_inverted": (26_826, 1000, 2000, (0.02, 0.15)),
    "mnist_deep_mlp": (167_818, 8000, 2000, (0.0, 0.2)),
    "mnist_mlp": (101_770, 8000, 2000, (0.0, 0.2)),
    "mnist_mobilenet": (63_490, 8000, 2000, (0.0, 0.2)),
    "watch_transformer": (104_263, 270, 263, (0.80, 0.90)),
    "watch_mobilenet": (59_767, 270, 263, (0.80, 0.90)),
}


@pytest.fixture(scope="module", params=TASKS)
def named(request: pytest.FixtureRequest) -> tuple[str, Task]:
    return request.param, TASKS[request.param]()


def learned(task: Task) -> int:
    """How many numbers are trained; statistics are not."""
    weights = normalise(task.model, batch=BATCH).weights
    return sum(value.size for name, value in weights.items() if "running" not in name)


def check_cuts(task: Task) -> None:
    """They are valid, and one tensor crosses each."""
    program = normalise(task.model, batch=BATCH)
    finder = CutFinder(program, program.weights)
    offered = {cut.name for cut in finder.valid()}
    for names in task.cuts.values():
        cuts = [finder.named(tensor) for tensor in names]
        assert [cut.name for cut in cuts] == list(names)
        assert offered.issuperset(names)


def test_every_task_has_its_facts() -> None:
    assert FACTS.keys() == TASKS.keys()


def test_the_data_are_whole(named: tuple[str, Task]) -> None:
    name, task = named
    for samples, count in zip((task.train, task.eval), FACTS[name][1:3], strict=True):
        x, labels = samples
        assert (len(x), len(labels)) == (count, count)
        assert (x.dtype, labels.dtype) == (np.float32, np.int64)
        assert np.isfinite(x).all()
        assert len(np.unique(labels)) == labels.max() + 1


def test_nothing_tested_was_trained_on(named: tuple[str, Task]) -> None:
    _, task = named
    trained_on = {row.tobytes() for row in task.train.x}
    assert not any(row.tobytes() in trained_on for row in task.eval.x)


def test_the_models_start_where_they_should(named: tuple[str, Task]) -> None:
    name, task = named
    low, high = FACTS[name][3]
    assert low <= accuracy(task.model, task.eval) <= high


def test_the_cuts_are_valid(named: tuple[str, Task]) -> None:
    name, task = named
    assert learned(task) == FACTS[name][0]
    check_cuts(task)


@pytest.mark.parametrize("make", [watch_transformer, watch_mobilenet])
def test_the_watches_meet_people_they_have_not_seen(make: Callable[[int], Task]) -> None:
    tasks = [make(person) for person in HELD_OUT_PEOPLE]
    before = [accuracy(task.model, task.eval) for task in tasks]
    assert 0.8 <= min(before) <= max(before) <= 0.92
    learned_from = {row.tobytes() for row in watch_pretraining().x}
    for task in tasks:
        assert not any(row.tobytes() in learned_from for row in task.train.x)


def test_normalization_is_shipped_apart_from_convolutions() -> None:
    ops = Counter(node.op_type for node in shipped("watch_mobilenet").graph.node)
    assert ops["BatchNormalization"] == ops["Conv"] == 17


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
def test_the_small_networks_are_small_and_every_weight_matters(
    make: Callable[[], Task],
) -> None:
    task = make()
    assert learned(task) < 2000
    check_cuts(task)
    x, labels = task.train
    exact = grad(task.model, loss="softmax_cross_entropy", batch=len(x))
    values = reference.run(exact, {"x": x, "labels": labels})
    gradients = {name: value for name, value in values.items() if "gradient/" in name}
    assert len(gradients) >= 8
    assert all(np.abs(value).max() > 1e-4 for value in gradients.values())


def test_what_is_shipped_is_small_and_stands_alone() -> None:
    paths = [*DATA.glob("*.onnx")]
    assert sum(path.stat().st_size for path in paths) < SHIPPED_BYTES
    for path in paths:
        onnx.checker.check_model(onnx.load(path), full_check=True)


def test_a_rotation_by_a_right_angle_moves_pixels_only() -> None:
    images = np.random.default_rng(0).random((3, 1, 28, 28), np.float32)
    np.testing.assert_allclose(rotate(images, 90), np.rot90(images, 1, (2, 3)), atol=1e-6)
