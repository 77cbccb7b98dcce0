"""One parameter that the file holds twice is found, and trained as one when asked."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from normal_form import expect_form, expect_same
from onnx import TensorProto, helper, numpy_helper
from small_models import build, normal

from edgetrain.compiler import reference, ties
from edgetrain.compiler.export import differences, export
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program, Tie
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.manifest import GraphName, Mode, Role

node = helper.make_node
EMBED, HEAD = "embed", "onnx::MatMul_7"


def language_model(*, transposed: bool = True) -> onnx.ModelProto:
    """Tokens [N, 3] -> embedding, Tanh, and a head that is the embedding again."""
    table = normal(6, 6)
    model = build(
        [
            node("Gather", [EMBED, "tokens"], ["a"]),
            node("Tanh", ["a"], ["b"]),
            node("MatMul", ["b", HEAD], ["y"]),
        ],
        [("tokens", ["N", 3])],
        ["y"],
        {EMBED: table, HEAD: table.T.copy() if transposed else table},
    )
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    return model


def gradients(program: Program) -> dict[str, np.ndarray]:
    recipe = Recipe(frozenset(program.weights), "mse", (Mode.VJP,))
    (bundle,) = compile_stages(program, [], recipe)
    graph = onnx.load_from_string(bundle.graphs[GraphName.LOSS])
    feeds = {
        "tokens": np.asarray([[0, 1, 5], [2, 2, 3]]),
        "labels": normal(2, 3, 6, seed=4),
    }
    values = reference.run(graph, {**feeds, **program.weights})
    spec = bundle.manifest.graphs[GraphName.LOSS]
    return {port.key: values[port.name] for port in spec.ports(Role.GRADIENT)}


def test_it_is_offered_and_left_alone() -> None:
    program = normalise(language_model(), batch=2)
    assert set(program.weights) == {EMBED, HEAD}
    assert program.ties == ()
    (remark,) = program.remarks
    assert f"{HEAD} (of {EMBED})" in remark


@pytest.mark.parametrize("transposed", [True, False])
def test_tied_it_trains_as_one_and_is_written_to_both(transposed: bool) -> None:
    model = language_model(transposed=transposed)
    program = normalise(model, batch=2, tie=True)
    expect_form(program)
    expect_same(model, program)
    assert list(program.weights) == [EMBED]
    assert program.ties == (Tie(HEAD, EMBED, transposed),)
    apart = gradients(normalise(model, batch=2))
    head = apart[HEAD].T if transposed else apart[HEAD]
    np.testing.assert_allclose(
        gradients(program)[EMBED], apart[EMBED] + head, rtol=1e-5, atol=1e-7
    )
    new = program.weights[EMBED] + 1
    exported = export(model, program, {EMBED: new})
    assert differences(model, exported) == []
    held = {t.name: numpy_helper.to_array(t) for t in exported.graph.initializer}
    np.testing.assert_array_equal(held[EMBED], new)
    np.testing.assert_array_equal(held[HEAD], new.T if transposed else new)
    assert export(model, program, {}) == model


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from([(2, 3), (2, 2)])),
        max_size=6,
    )
)
def test_every_later_equal_has_one_tie_to_the_first(drawn) -> None:
    weights = {
        str(i): (m.T if turned else m)
        for i, (seed, turned, shape) in enumerate(drawn)
        for m in [normal(*shape, seed=seed)]
    }
    found = {tie.name: tie for tie in ties.find(weights)}
    for i, value in enumerate(weights.values()):
        equal = [
            earlier
            for earlier in list(weights)[:i]
            if np.array_equal(weights[earlier], value)
            or np.array_equal(weights[earlier].T, value)
        ]
        assert (str(i) in found) == bool(equal)
        if equal:
            assert found[str(i)].of == equal[0]
    assert ties.expanded(weights, found.values()).keys() == weights.keys()
    for name, value in ties.expanded(weights, found.values()).items():
        np.testing.assert_array_equal(value, weights[name])


def test_fresh_parameters_and_vectors_are_no_ties() -> None:
    weights = {
        "a": np.zeros((2, 2), np.float32),
        "b": np.zeros((2, 2), np.float32),
        "c": normal(4),
        "d": normal(4),
    }
    assert ties.find(weights) == ()
