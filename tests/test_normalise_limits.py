"""Batch sizes, shapes, refusals, and the pieces normalising is made of."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from normal_form import expect_same, outputs_of
from onnx import TensorProto, helper, numpy_helper
from small_models import build, conditional, convnet, mlp, normal

from edgetrain.compiler import agreement, reference, shapes, tidy
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.values import value_table
from edgetrain.errors import EngineError, GraphError

node = helper.make_node


# Batch sizes and shapes


def test_a_fixed_batch_is_replaced_where_rows_are_independent() -> None:
    model = mlp()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    model.graph.node.append(node("Reshape", ["y", "flat"], ["z"]))
    model.graph.initializer.append(
        numpy_helper.from_array(np.asarray([1, 1, 1], np.int64), "flat")
    )
    model.graph.output[0].name = "z"
    program = normalise(model, batch=4)
    assert program.outputs[0].shape == (4, 1, 1)
    single = normalise(model, batch=1)
    x = normal(4, 4, seed=9)
    together = outputs_of(program, {"x": x})["z"]
    for row in range(4):
        alone = outputs_of(single, {"x": x[row : row + 1]})["z"]
        np.testing.assert_allclose(together[row], alone[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("fixed", "batch"), [(1, 4), (2, 4), (4, 2), (2, 1)])
def test_a_fixed_batch_is_refused_where_rows_mix(fixed: int, batch: int) -> None:
    model = build(
        [
            node("MatMul", ["x", "w"], ["h"]),
            node("ReduceMax", ["h", "axes"], ["m"], keepdims=1),
            node("Add", ["h", "m"], ["y"]),
        ],
        [("x", [fixed, 4])],
        ["y"],
        {"w": normal(4, 2), "axes": np.asarray([0], np.int64)},
    )
    normalise(model, batch=fixed)
    with pytest.raises(
        GraphError, match=f"'x' takes {fixed}.*Take {fixed} samples at a time"
    ):
        normalise(model, batch=batch)


def test_dynamic_extents_come_from_the_caller() -> None:
    model = build(
        [node("GlobalAveragePool", ["x"], ["p"]), node("Conv", ["p", "w"], ["y"])],
        [("x", ["N", 3, "H", "W"])],
        ["y"],
        {"w": normal(2, 3, 1, 1)},
    )
    with pytest.raises(GraphError, match=r"input 'x': dimension 2 \('H'\) is dynamic"):
        normalise(model, batch=2)
    with pytest.raises(GraphError, match="dimension 1 is 3 in the model"):
        normalise(model, batch=2, shapes={"x": (4, 8, 8)})
    with pytest.raises(GraphError, match="has 3 dimensions behind the batch"):
        normalise(model, batch=2, shapes={"x": (3, 8)})
    with pytest.raises(GraphError, match="'z', which is not an input"):
        normalise(model, batch=2, shapes={"z": (3, 8)})
    with pytest.raises(GraphError, match="batch size is 0"):
        normalise(model, batch=0)
    program = normalise(model, batch=2, shapes={"x": (3, 8, 9)})
    assert program.inputs[0].shape == (2, 3, 8, 9)


def test_shapes_that_inference_does_not_know_are_measured() -> None:
    model = build(
        [
            node("GroupNormalization", ["x", "scale", "bias"], ["n"], num_groups=2),
            node("Shape", ["n"], ["all"]),
            node("Slice", ["all", "nought", "two"], ["lead"]),
            node("Concat", ["lead", "rest"], ["target"], axis=0),
            node("Reshape", ["n", "target"], ["y"]),
        ],
        [("x", ["N", 4, 2, 3])],
        ["y"],
        {
            "scale": normal(2),
            "bias": normal(2, seed=1),
            "nought": np.asarray([0], np.int64),
            "two": np.asarray([2], np.int64),
            "rest": np.asarray([-1], np.int64),
        },
        18,
    )
    assert "n" not in shapes.known(shapes.infer(model))
    program = normalise(model, batch=2)
    expect_same(model, program)
    assert [n.op_type for n in program.model.graph.node][1:] == ["Reshape"]
    assert value_table(program.model)["n"].shape == (2, 4, 2, 3)


@pytest.mark.parametrize("length", ["shape", "NonZero"])
def test_shapes_that_hang_on_the_data_are_refused(length: str) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("NonZero", ["h"], ["where"]),
        node("Shape", ["where"], ["shape"]),
        node("Cast", ["h"], ["whole"], to=TensorProto.INT64),
        node("ReduceMax", ["whole"], ["rows"], keepdims=0),
        node("Unsqueeze", ["rows", "axes"], ["count"]),
        node("ConstantOfShape", ["count" if length == "shape" else "shape"], ["zeros"]),
        node("ReduceSum", ["zeros"], ["total"], keepdims=0),
        node("Add", ["h", "total"], ["y"]),
    ]
    tensors = {"w": normal(3, 2), "axes": np.asarray([0], np.int64)}
    text = refused(build(nodes, [("x", ["N", 3])], ["y"], tensors))
    assert "depends on the data" in text


# Refusals


def refused(model: onnx.ModelProto) -> str:
    with pytest.raises(GraphError) as caught:
        normalise(model, batch=2)
    return str(caught.value)


def test_refusals_name_the_culprit_and_the_way_out() -> None:
    custom = mlp()
    custom.graph.node[1].domain = "com.example"
    custom.opset_import.append(helper.make_opsetid("com.example", 1))
    assert "node 'relu' is the custom op com.example::Relu" in refused(custom)

    sparse = mlp()
    values = numpy_helper.from_array(np.ones(1, np.float32), "sparse_w")
    indices = numpy_helper.from_array(np.zeros(1, np.int64), "at")
    sparse.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    assert "'sparse_w' is sparse" in refused(sparse)

    sequence = mlp()
    sequence.graph.input.append(
        helper.make_tensor_sequence_value_info("many", TensorProto.FLOAT, None)
    )
    assert "'many' is a sequence, not a tensor" in refused(sequence)

    text = mlp()
    text.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING
    assert "'x' holds strings" in refused(text)

    for version in (6, 999):
        old = mlp()
        old.opset_import[0].version = version
        assert f"opset {version};" in refused(old)

    rankless = mlp()
    rankless.graph.input[0].type.tensor_type.ClearField("shape")
    assert "input 'x' has no shape" in refused(rankless)

    masked = convnet()
    masked.graph.node[4].output.append("mask")
    masked.graph.output.append(
        helper.make_tensor_value_info("mask", TensorProto.BOOL, None)
    )
    assert "Dropout node 'drop' also gives 'mask'" in refused(masked)

    scatter = node("TensorScatter", ["x", "x"], ["y"])
    newer = build([scatter], [("x", ["N", 3, 4])], ["y"], opset=24)
    assert "moved from opset 24 to 20: No Previous Version of TensorScatter" in refused(
        newer
    )


def test_a_contradicting_graph_is_a_graph_error() -> None:
    model = mlp()
    model.graph.initializer[2].CopyFrom(numpy_helper.from_array(normal(5, 1), "w2"))
    assert refused(model)


def test_a_refusal_that_is_not_about_the_batch_says_its_own_reason() -> None:
    model = conditional(condition_from_data=True)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    text = refused(model)
    assert text.startswith("If node 'choose' depends on the data")
    assert "batch" not in text


def test_what_was_not_compared_or_stays_constant_is_said() -> None:
    random = build(
        [
            node("RandomNormalLike", ["x"], ["noise"]),
            node("MatMul", ["noise", "w"], ["y"]),
        ],
        [("x", ["N", 3])],
        ["y"],
        {"w": normal(3, 2)},
    )
    assert "was not compared" in normalise(random, batch=2).remarks[0]

    inside = mlp()
    held = numpy_helper.from_array(normal(4, 4))
    function = helper.make_function(
        "local",
        "Mix",
        ["a"],
        ["b"],
        [node("Constant", [], ["m"], value=held), node("MatMul", ["a", "m"], ["b"])],
        [helper.make_opsetid("", 20)],
    )
    inside.functions.append(function)
    inside.opset_import.append(helper.make_opsetid("local", 1))
    inside.graph.node.insert(0, node("Mix", ["x"], ["mixed"], domain="local"))
    inside.graph.node[1].input[0] = "mixed"
    (remark,) = normalise(inside, batch=2).remarks
    assert remark.startswith("Constant in training")


def test_a_model_that_computes_something_else_does_not_pass_its_check() -> None:
    model = mlp()
    program = normalise(model, batch=2)
    feeds = {"x": normal(2, 4)}
    other = {**program.weights, "b2": program.weights["b2"] + np.float32(0.1)}
    for values, fails in ((program.weights, False), (other, True)):
        trial = agreement.Trial(model, program.model, values, 2, {"x": 2})
        if fails:
            with pytest.raises(GraphError, match="'y' differs"):
                agreement.verify(trial, feeds)
        else:
            assert agreement.verify(trial, feeds) == ""


# Pieces


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(13)))
def test_nodes_in_any_order_are_sorted(order: list[int]) -> None:
    model = convnet()
    sorted_nodes = list(model.graph.node)
    tidy.set_nodes(model.graph, [sorted_nodes[i] for i in order])
    tidy.sort_nodes(model.graph)
    seen = {"x", *(tensor.name for tensor in model.graph.initializer)}
    for n in model.graph.node:
        assert tidy.reads(n) <= seen
        seen.update(n.output)
    assert len(model.graph.node) == 13


def test_a_cycle_is_refused() -> None:
    model = build(
        [node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"])],
        [("x", ["N", 3])],
        ["b"],
    )
    assert "cycle" in refused(model)


def test_comparison_finds_what_differs() -> None:
    value = {"y": normal(4, 3)}
    assert agreement.compare(value, value, 0.0) == ""
    moved = {"y": value["y"] + np.float32(0.01)}
    assert "differs" in agreement.compare(value, moved, 1e-3)
    assert agreement.compare(value, {"y": value["y"][:2]}, 0.0) == ""
    assert "shape" in agreement.compare(value, {"y": value["y"][:, :2]}, 0.0)
    broken = {"y": np.where(value["y"] > 0, np.nan, value["y"])}
    assert "finite" in agreement.compare(value, broken, 1e9)


def test_the_reference_reports_what_it_cannot_run() -> None:
    with pytest.raises(EngineError, match="ONNX Runtime"):
        reference.run(mlp(), {"x": normal(2, 5)})
    hidden = reference.run(mlp(), {"x": normal(2, 4), "other": normal(1)}, ["h", "r"])
    np.testing.assert_array_equal(np.maximum(hidden["h"], 0), hidden["r"])
