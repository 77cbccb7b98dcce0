"""Cutting a model anywhere and joining the pieces gives the model back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from onnx import helper

from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.errors import PlanError
from edgetrain.manifest import Mode
from tests.cut_models import MODELS, program, samples
from tests.small_models import build, normal
from tests.stage_runs import compiled, evaluate, finder, whole

NAMES = sorted(MODELS)
node = helper.make_node


def assert_joins(name: str, cuts) -> None:
    bundles = compiled(name, cuts)
    feeds = samples(name)
    found, expected = evaluate(bundles, feeds), whole(program(name), feeds)
    for output, value in expected.items():
        np.testing.assert_allclose(found[output], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_joining_the_stages_of_one_or_two_cuts_gives_the_model(name):
    cuts = finder(name).valid()
    assert cuts
    for count in (1, 2):
        for chosen in itertools.combinations(cuts, count):
            assert_joins(name, chosen)


@pytest.mark.parametrize("name", NAMES)
def test_joining_all_stages_gives_the_model(name):
    assert_joins(name, finder(name).valid())


@pytest.mark.parametrize("name", ["encoder", "late_input", "early_output"])
def test_joining_at_any_tensor_gives_the_model(name):
    """Also where it is not cheap: in the middle of attention."""
    found = finder(name)
    end = found.valid()[-1].position
    positions = [p for p in range(1, end + 1) if not found.splits_tie(p)]
    for position in positions:
        assert_joins(name, [found.named(found.nodes[position - 1].output)])
    assert len(positions) > end // 2


@pytest.mark.parametrize("name", NAMES)
def test_what_crosses_is_what_is_made_before_and_needed_after(name):
    found, model = finder(name), program(name)
    outputs = {spec.name for spec in model.outputs}
    for position in range(len(found.nodes)):
        before, after = found.nodes[:position], found.nodes[position:]
        made = {spec.name for spec in model.inputs}
        made |= {value for n in before for value in n.outputs}
        needed = outputs | {value for n in after for value in n.inputs}
        crossing = found.at(position).crossing
        assert {spec.name for spec in crossing} == made & needed
        assert found.at(position).nbytes == sum(spec.nbytes for spec in crossing)


@pytest.mark.parametrize("name", NAMES)
def test_the_layers_cover_the_model_once(name):
    found = finder(name)
    layers = found.layers()
    assert [layer.start for layer in layers] == [0, *(x.stop for x in layers[:-1])]
    assert layers[-1].stop == len(found.nodes)
    weights = sum(value.size for value in program(name).weights.values())
    assert sum(layer.weight_elements for layer in layers) == weights
    assert all(layer.flop > 0 for layer in layers)


@pytest.mark.parametrize("name", NAMES)
def test_a_valid_cut_is_the_cheapest_between_its_neighbours(name):
    """No cut between two neighbouring valid ones is cheaper than both."""
    found = finder(name)
    for one, other in itertools.pairwise(found.valid()):
        costs = [found.at(p).nbytes for p in range(one.position, other.position + 1)]
        assert max(one.nbytes, other.nbytes) >= min(costs)
        assert one.position < other.position
        assert one.crossing != other.crossing


def test_activations_stay_with_the_layer_they_follow():
    assert [cut.name for cut in finder("chain").valid()] == ["p1", "f", "r3"]
    assert [cut.name for cut in finder("residual").valid()] == ["r0", "r0+r1", "f"]


def test_a_prepared_weight_stays_with_its_user():
    """The encoder's file begins with Transposes that are used at its end."""
    for cut in finder("encoder").valid():
        assert not any(name.endswith(".t") for name in cut.name.split("+"))
    bundles = compiled("encoder", [finder("encoder").named("e")])
    assert [spec.name for spec in bundles[0].manifest.weights] == ["we"]


def tied(prepared: bool) -> Program:
    """w is used by the first and by the last of three layers."""
    last = "w.t" if prepared else "w"
    model = build(
        [
            node("Transpose", ["w"], ["w.t"], perm=[1, 0]),
            node("MatMul", ["x", last], ["h1"]),
            node("Relu", ["h1"], ["r1"]),
            node("MatMul", ["r1", "v"], ["h2"]),
            node("Tanh", ["h2"], ["r2"]),
            node("MatMul", ["r2", last], ["h3"]),
            node("MatMul", ["h3", "u"], ["y"]),
        ],
        [("x", ["N", 5])],
        ["y"],
        {"w": normal(5, 5), "v": normal(5, 5, seed=1), "u": normal(5, 5, seed=2)},
    )
    return normalise(model, batch=3)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_trainable_weight_is_never_split(prepared):
    """Neither the weight itself nor what several layers make of it crosses a cut."""
    found = CutFinder(tied(prepared), {"u", "v", "w"})
    assert [cut.name for cut in found.valid()] == ["h3"]
    for tensor in ("h1", "r1", "h2", "r2"):
        with pytest.raises(PlanError, match="used both before and after"):
            found.named(tensor)


def test_a_frozen_weight_may_be_used_on_both_sides():
    found = CutFinder(tied(prepared=False), {"u", "v"})
    assert [cut.name for cut in found.valid()] == ["r1", "r2", "h3"]


def test_nodes_whose_first_output_is_absent_are_kept_apart():
    """Two LSTM that give only their last state: both have '' as their first output."""
    shapes = {"w": (1, 12, 4), "r": (1, 12, 3), "w2": (1, 12, 3), "r2": (1, 12, 3)}
    model = build(
        [
            node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
            node("LSTM", ["t", "w", "r"], ["", "h1"], hidden_size=3),
            node("LSTM", ["h1", "w2", "r2"], ["", "h2"], hidden_size=3),
            node("Squeeze", ["h2", "zero"], ["y"]),
        ],
        [("x", ["N", 2, 4])],
        ["y"],
        {"zero": np.asarray([0], np.int64)}
        | {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())},
    )
    found = CutFinder(normalise(model, batch=3), frozenset())
    assert [n.op_type for n in found.nodes if n.op_type == "LSTM"] == ["LSTM", "LSTM"]


@pytest.mark.parametrize("name", NAMES)
def test_a_named_cut_lies_right_after_its_tensor(name):
    found = finder(name)
    for position, made in enumerate(found.nodes[:-1], 1):
        if not found.splits_tie(position):
            cut = found.named(made.output)
            assert cut.position == position
            assert made.output in cut.name.split("+")


@pytest.mark.parametrize("tensor", ["nonsense", "x", "y", "c1"])
def test_what_cannot_be_cut_at_is_refused_with_what_can(tensor):
    with pytest.raises(PlanError, match=rf"'{tensor}' .* begin with: p1, f, r3"):
        finder("chain").named(tensor)


def test_a_model_without_cuts_says_so():
    model = build([node("MatMul", ["x", "w"], ["y"])], [("x", ["N", 2])], ["y"],
                  {"w": normal(2, 3)})  # fmt: skip
    found = CutFinder(normalise(model, batch=1), {"w"})
    assert found.valid() == ()
    with pytest.raises(PlanError, match="begin with: none"):
        found.named("q")


def test_cuts_and_modes_must_fit():
    cuts = finder("chain").valid()
    recipe = Recipe(frozenset({"w3"}), "softmax_cross_entropy", (Mode.VJP,) * 3)
    with pytest.raises(PlanError, match="3 gradient modes for 2 stages"):
        compile_stages(program("chain"), cuts[:1], recipe)
    with pytest.raises(PlanError, match="ascending"):
        compile_stages(program("chain"), [cuts[1], cuts[0]], recipe)
    with pytest.raises(PlanError, match="ascending"):
        compile_stages(program("chain"), [cuts[0], cuts[0]], recipe)


def test_the_loss_and_its_target_stay_together():
    """Cross entropy contains the Softmax, so nothing may lie between the two."""
    recipe = Recipe(frozenset({"w"}), "softmax_cross_entropy", (Mode.VJP,) * 2)
    cut = finder("mobile").named("z")
    with pytest.raises(PlanError, match="separates the loss from 'z'"):
        compile_stages(program("mobile"), [cut], recipe)
