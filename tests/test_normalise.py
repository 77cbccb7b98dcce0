"""Normalised models compute what the file does, in the form `Program` promises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inputs import cached
from normal_form import expect_form, expect_same
from onnx import TensorProto, helper, numpy_helper
from small_models import aliased, build, conditional, convnet, mlp, normal

from edgetrain.compiler import weights
from edgetrain.compiler.load import load
from edgetrain.compiler.normalise import normalise
from edgetrain.errors import GraphError

node = helper.make_node
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 14, 17, 20, 21, 23])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_opset_gives_the_same_function(opset: int, batch: int) -> None:
    if opset < 9:
        model = mlp()
        model.opset_import[0].version = opset
    else:
        model = convnet(opset)
    program = normalise(model, batch=batch)
    expect_form(program)
    expect_same(model, program)


def test_weights_keep_their_names_wherever_the_file_has_them() -> None:
    program = normalise(convnet(), batch=2)
    kinds = {name: source.kind for name, source in program.sources.items()}
    assert kinds == {
        "bn.scale": "initializer",
        "bn.bias": "initializer",
        "bn.mean": "initializer",
        "bn.var": "initializer",
        "fc.w": "initializer",
        "conv.w": "node",
        "conv.b": "node",
        "fc.b": "node",
    }
    assert program.states == {"bn.mean", "bn.var"}
    (momentum,) = (
        a.f for a in program.model.graph.node[1].attribute if a.name == "momentum"
    )
    assert momentum == np.float32(0.9)
    assert [n.op_type for n in program.model.graph.node] == [
        "Conv",
        "BatchNormalization",
        "Reshape",
        "Gemm",
    ]
    assert program.outputs[0].name == "y"


def test_the_model_given_is_not_altered() -> None:
    model = convnet()
    before = model.SerializeToString(deterministic=True)
    normalise(model, batch=2)
    assert model.SerializeToString(deterministic=True) == before


def test_normalising_a_normalised_model_changes_nothing() -> None:
    first = normalise(convnet(), batch=2)
    again = onnx.ModelProto()
    again.CopyFrom(first.model)
    del again.graph.input[len(first.inputs) :]
    again.graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in first.weights.items()
    )
    second = normalise(again, batch=2)
    assert list(second.model.graph.node) == list(first.model.graph.node)
    assert second.weights.keys() == first.weights.keys()


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_other_float_types_become_float32(dtype: str) -> None:
    model = mlp(dtype)
    program = normalise(model, batch=3)
    expect_form(program)
    assert program.inputs[0].dtype == "float32"
    assert {source.dtype for source in program.sources.values()} == {dtype}
    assert any(dtype in remark for remark in program.remarks)


def test_casts_around_half_weights_vanish() -> None:
    model = build(
        [
            node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT),
            node("MatMul", ["x", "wide"], ["y"]),
        ],
        [("x", ["N", 4])],
        ["y"],
        {"w": normal(4, 2, dtype="float16")},
    )
    program = normalise(model, batch=2)
    assert [n.op_type for n in program.model.graph.node] == ["MatMul"]
    assert list(program.weights) == ["w"]


def test_settings_masks_and_scalars_are_not_weights() -> None:
    mask = np.triu(np.full((4, 4), -np.inf, np.float32), 1)
    model = build(
        [
            node("MatMul", ["x", "w"], ["a"]),
            node("Add", ["a", "mask"], ["b"]),
            node("Softmax", ["b"], ["c"]),
            node("Clip", ["c", "low", "high"], ["d"]),
            node("Pow", ["d", "exponents"], ["e"]),
            node("Mul", ["e", "scalar"], ["f"]),
            node("PRelu", ["f", "slope"], ["g"]),
            node("Resize", ["g", "", "scales"], ["y"], mode="nearest"),
        ],
        [("x", ["N", 4, 4])],
        ["y"],
        {
            "w": normal(4, 4),
            "mask": mask,
            "low": np.asarray(0, np.float32),
            "high": np.asarray(1, np.float32),
            "exponents": np.asarray([1, 2, 1, 2], np.float32),
            "scalar": np.asarray(0.5, np.float32),
            "slope": np.asarray([0.25], np.float32),
            "scales": np.asarray([1, 2, 2], np.float32),
        },
    )
    program = normalise(model, batch=2)
    assert list(program.weights) == ["w", "slope"]
    assert program.outputs[0].shape == (2, 8, 8)


@given(
    shape=st.lists(st.integers(1, 3), max_size=3),
    index=st.integers(0, 2),
    op=st.sampled_from(["Conv", "Add", "Mul", "Gemm", "PRelu"]),
)
def test_a_tensor_of_one_element_is_a_weight_only_as_a_parameter(shape, index, op) -> None:
    value = np.ones(shape, np.float32)
    parameter = index in weights.PARAMETERS.get(op, ())
    assert weights.is_weight(value, [(op, index)]) == (value.size > 1 or parameter)
    assert not weights.is_weight(value, [(op, index), ("Clip", 1)])
    assert not weights.is_weight(value * np.inf, [(op, index)])
    assert not weights.is_weight(value, [])


def test_merged_parameters_are_told_apart_by_their_alias() -> None:
    model = aliased()
    program = normalise(model, batch=2)
    expect_form(program)
    expect_same(model, program)
    assert set(program.weights) == {
        "norm1.scale",
        "norm1.bias",
        "norm2.scale",
        "norm2.bias",
        "w",
    }
    assert "norm2.scale (of norm1.scale)" in program.remarks[0]


def test_an_initializer_of_several_nodes_stays_one_weight_and_is_named() -> None:
    model = aliased()
    del model.graph.node[:2]
    for name in ("scale", "bias"):
        replaced = model.graph.node[2].input
        replaced[replaced[:].index(f"norm2.{name}")] = f"norm1.{name}"
    program = normalise(model, batch=2)
    assert set(program.weights) == {"norm1.scale", "norm1.bias", "w"}
    assert "norm1.scale, norm1.bias" in program.remarks[0]


def test_local_functions_are_inlined() -> None:
    model = mlp()
    function = helper.make_function(
        "local",
        "Twice",
        ["a"],
        ["b"],
        [node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 20)],
    )
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.graph.node.append(node("Twice", ["y"], ["z"], domain="local"))
    model.graph.output[0].name = "z"
    program = normalise(model, batch=2)
    expect_form(program)
    expect_same(model, program)


def test_a_branch_on_the_rank_is_taken_and_one_on_the_data_refused() -> None:
    model = conditional(condition_from_data=False)
    program = normalise(model, batch=2)
    expect_form(program)
    expect_same(model, program)
    assert list(program.weights) == ["w"]
    with pytest.raises(GraphError, match=r"If node 'choose' depends on the data.*export"):
        normalise(conditional(condition_from_data=True), batch=2)


def test_outputs_may_be_inputs_weights_aliases_or_shared() -> None:
    model = build(
        [
            node("Identity", ["x"], ["copy"]),
            node("Add", ["x", "w"], ["sum"]),
            node("Identity", ["sum"], ["first"]),
            node("Identity", ["sum"], ["second"]),
            node("Identity", ["w"], ["bias"]),
            node("Relu", ["sum"], ["relu"]),
        ],
        [("x", ["N", 3])],
        ["copy", "first", "second", "bias", "relu"],
        {"w": normal(3)},
    )
    program = normalise(model, batch=2)
    expect_form(program)
    expect_same(model, program)


@pytest.mark.parametrize(
    ("name", "count", "states"),
    [("squeezenet", 52, 0), ("resnet50", 267, 106), ("shufflenet", 248, 98)],
)
def test_real_topologies_of_opset_9(name: str, count: int, states: int) -> None:
    program = normalise(load(LIGHT / f"light_{name}.onnx"), batch=1)
    expect_form(program)
    assert (len(program.weights), len(program.states)) == (count, states)


def test_a_real_classifier_with_weights_in_constant_nodes() -> None:
    model = load(cached("text_direction.onnx"))
    program = normalise(model, batch=2, shapes={"x": (3, 48, 192)})
    expect_form(program)
    expect_same(model, program)
    assert len(program.weights) == 213
    assert {source.kind for source in program.sources.values()} == {"node"}
