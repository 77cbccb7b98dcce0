"""The state between two steps can be taken out, cut anew, and gone on from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.bundle import Bundle
from edgetrain.errors import BundleError
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.stage import Stage
from edgetrain.stage_state import ModelState, StageState, join, split
from tests.cut_models import samples
from tests.stage_runs import ENGINE, compiled, finder

OPTIMIZERS = {
    "sgd": OptimizerSpec("sgd", LRSpec(0.1), momentum=0.9),
    "plain": OptimizerSpec("sgd", LRSpec(0.1)),
    "adam": OptimizerSpec("adam", LRSpec(0.01, kind="cosine", total_steps=9)),
}
FUZZ = settings(max_examples=200)


def bundles(name: str, positions: Sequence[int]) -> list[Bundle]:
    cuts = finder(name).valid()
    return compiled(name, [cuts[position] for position in positions])


def stages_of(made: Sequence[Bundle], optimizer: str = "sgd") -> list[Stage]:
    spec = OPTIMIZERS[optimizer]
    return [Stage(b, ENGINE, spec, microbatches=1, seed=0) for b in made]


def train(stages: Sequence[Stage], name: str, steps: range) -> None:
    for step in steps:
        feeds = samples(name, seed=step)
        values = {spec.name: feeds[spec.name] for spec in stages[0].manifest.receives}
        for stage in stages:
            values = dict(stage.forward(Tick(step, 0), values))
        arriving = {}
        for stage in reversed(stages):
            if stage.manifest.labels is not None:
                arriving = {**arriving, "labels": feeds["labels"]}
            arriving = dict(stage.backward(Tick(step, 0), arriving).cotangents)
        for stage in stages:
            stage.update(step)


def state_of(stages: Sequence[Stage], step: int) -> ModelState:
    states = [stage.state(step) for stage in stages]
    assert None not in states
    return join(states, [stage.manifest for stage in stages])


def resumed(made: Sequence[Bundle], state: ModelState) -> list[Bundle]:
    """Through the bytes that travel."""
    moved = [bundle.resumed(split(state, bundle.manifest)) for bundle in made]
    return [Bundle.decode(bundle.encode()) for bundle in moved]


def same(a: StageState, b: StageState) -> bool:
    return (
        a.steps == b.steps
        and a.weights.tobytes() == b.weights.tobytes()
        and a.optimizer.keys() == b.optimizer.keys()
        and all(np.array_equal(a.optimizer[n], b.optimizer[n]) for n in a.optimizer)
    )


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("name", ["residual", "encoder"])
def test_a_moved_stage_goes_on_as_if_it_had_stayed(name, optimizer):
    whole = bundles(name, [0, 1])
    stayed = stages_of(whole, optimizer)
    train(stayed, name, range(5))
    left = stages_of(whole, optimizer)
    train(left, name, range(3))
    moved = stages_of(resumed(whole, state_of(left, 2)), optimizer)
    assert [stage.parameters.last for stage in moved] == [2, 2, 2]
    train(moved, name, range(3, 5))
    for a, b in zip(stayed, moved, strict=True):
        assert same(a.state(4), b.state(4))


@pytest.mark.parametrize(("before", "after"), [([0], [1]), ([0, 1], [0]), ([], [0, 1])])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_cut_elsewhere_it_reaches_the_same_weights(before, after, optimizer):
    name = "residual"
    stayed = stages_of(bundles(name, before), optimizer)
    train(stayed, name, range(6))
    left = stages_of(bundles(name, before), optimizer)
    train(left, name, range(3))
    moved = stages_of(resumed(bundles(name, after), state_of(left, 2)), optimizer)
    train(moved, name, range(3, 6))
    expected, found = state_of(stayed, 5), state_of(moved, 5)
    assert expected.weights.keys() == found.weights.keys()
    for key, weight in expected.weights.items():
        error = np.linalg.norm(found.weights[key] - weight)
        assert error <= 1e-6 * max(np.linalg.norm(weight), 1e-3), key


def test_split_then_join_is_the_identity():
    stages = stages_of(bundles("residual", [0]), "adam")
    train(stages, "residual", range(2))
    state = state_of(stages, 1)
    for cuts in ([], [0], [1], [0, 1]):
        manifests = [bundle.manifest for bundle in bundles("residual", cuts)]
        again = join([split(state, m) for m in manifests], manifests)
        assert again.steps == state.steps
        assert again.weights.keys() == state.weights.keys()
        assert all(
            np.array_equal(again.weights[n], state.weights[n]) for n in state.weights
        )
        assert again.vectors.keys() == state.vectors.keys() == {"mean", "square"}
        for name, parts in state.vectors.items():
            assert again.vectors[name].keys() == parts.keys()
            assert all(np.array_equal(again.vectors[name][n], parts[n]) for n in parts)
        assert int(again.scalars["steps"]) == 2


def test_only_the_present_state_is_given():
    (stage,) = stages_of(bundles("residual", []))
    assert stage.state(-1) is not None
    train([stage], "residual", range(2))
    assert stage.state(0) is None
    assert stage.state(2) is None
    assert stage.state(1).steps == 2


def test_states_of_different_steps_are_not_put_together():
    first, second = stages_of(bundles("residual", [0]))
    manifests = [first.manifest, second.manifest]
    early = StageState(1, first.parameters.weights, {})
    late = StageState(2, second.parameters.weights, {})
    with pytest.raises(BundleError, match="different steps"):
        join([early, late], manifests)


def test_a_state_without_a_weight_of_the_stage_is_refused():
    (bundle,) = bundles("residual", [])
    with pytest.raises(BundleError, match="has no weight"):
        split(ModelState(1, {}, {}, {}), bundle.manifest)


def encoded() -> tuple[bytes, Bundle]:
    made = bundles("residual", [0])
    stages = stages_of(made, "adam")
    train(stages, "residual", range(1))
    return stages[0].state(0).encode(), made[0]


DATA, BUNDLE = encoded()


def test_decode_undoes_encode():
    state = StageState.decode(DATA, BUNDLE.manifest)
    assert state.encode() == DATA


@FUZZ
@given(st.data())
def test_a_damaged_state_is_refused_or_whole(data):
    body = bytearray(DATA)
    place = data.draw(st.integers(0, len(body) - 1))
    if data.draw(st.booleans()):
        body[place] ^= data.draw(st.integers(1, 255))
    else:
        del body[place:]
    try:
        state = StageState.decode(bytes(body), BUNDLE.manifest)
    except BundleError:
        return
    assert state.weights.size == BUNDLE.manifest.elements
    assert state.steps >= 0
    allowed = {(), (BUNDLE.manifest.trainable_elements,)}
    assert {array.shape for array in state.optimizer.values()} <= allowed


def test_the_state_of_another_stage_is_refused():
    other = bundles("residual", [0])[1]
    with pytest.raises(BundleError):
        StageState.decode(DATA, other.manifest)
