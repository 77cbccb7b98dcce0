"""Operators newer than our opset, and attention rows that a mask leaves nothing of."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from normal_form import expect_form, expect_same
from onnx import helper
from small_models import build, normal

from edgetrain.compiler import reference
from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.decompose import decompose
from edgetrain.compiler.masked_rows import guard_masked_rows
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.compiler.values import constants, value_table
from edgetrain.compiler.vjp import vjp
from edgetrain.errors import GraphError
from edgetrain.tensors import TensorSpec

node = helper.make_node
ROWS = ("x", ["N", 5, 8])
IMAGE = ("x", ["N", 4, 5, 6])


def decoder() -> onnx.ModelProto:
    """A decoder block as of opset 24."""
    return build(
        [
            node("RMSNormalization", ["x", "g"], ["n"]),
            node("MatMul", ["n", "wq"], ["q"]),
            node("MatMul", ["n", "wk"], ["k"]),
            node("RotaryEmbedding", ["q", "cos", "sin"], ["qr"], num_heads=2),
            node("RotaryEmbedding", ["k", "cos", "sin"], ["kr"], num_heads=2),
            node("Attention", ["qr", "kr", "n"], ["a"], is_causal=1,
                 q_num_heads=2, kv_num_heads=2),
            node("MatMul", ["a", "wo"], ["o"]),
            node("Swish", ["o"], ["s"], alpha=1.5),
            node("Add", ["s", "x"], ["y"]),
        ],
        [ROWS],
        ["y"],
        {
            "g": normal(8), "wq": normal(8, 8, seed=1), "wk": normal(8, 8, seed=2),
            "wo": normal(8, 8, seed=3), "cos": normal(3, 5, 2, seed=4),
            "sin": normal(3, 5, 2, seed=5),
        },
        24,
    )  # fmt: skip


def pooled() -> onnx.ModelProto:
    return build(
        [
            node("GroupNormalization", ["x", "s", "b"], ["n"], num_groups=2),
            node("GlobalMaxPool", ["n"], ["y"]),
        ],
        [IMAGE],
        ["y"],
        {"s": normal(4), "b": normal(4, seed=1)},
        22,
    )


def cropped() -> onnx.ModelProto:
    nodes = [
        node("CenterCropPad", ["x", "size"], ["c"], axes=[2, 3]),
        node("Mul", ["c", "w"], ["y"]),
    ]
    tensors = {"size": np.array([3, 9]), "w": normal(4, 1, 1)}
    return build(nodes, [IMAGE], ["y"], tensors)


MODELS = {"decoder": decoder, "pooled": pooled, "cropped": cropped}


@pytest.mark.parametrize("name", MODELS)
def test_newer_operators_train(name: str) -> None:
    model = MODELS[name]()
    program = normalise(model, batch=3)
    expect_form(program)
    expect_same(model, program, 1e-5)
    feeds = {x.name: normal(*x.shape, seed=9) for x in program.inputs}
    found = gradients(program, feeds)
    assert set(found) == set(program.weights)
    for weight, gradient in found.items():
        step = normal(*gradient.shape, seed=7)
        expected = float((gradient.astype(np.float64) * step).sum())
        assert slope(program, feeds, weight, step) == pytest.approx(expected, rel=0.02), (
            weight
        )


def gradients(program: Program, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of the sum of the only output."""
    g = GraphBuilder(value_table(program.model), constants(program.model))
    nodes = [Node.from_proto(proto) for proto in program.model.graph.node]
    for n in nodes:
        g.append(n)
    (output,) = program.outputs
    seed = g.constant(np.ones(output.shape, np.float32))
    found = vjp(g, nodes, {output.name: seed}, list(program.weights))
    specs = [TensorSpec(dx, "float32", g.shape(x)) for x, dx in found.items()]
    inputs = [g.spec(info.name) for info in program.model.graph.input]
    values = reference.run(g.model(inputs, specs, "back"), {**feeds, **program.weights})
    return {x: values[dx] for x, dx in found.items()}


def slope(
    program: Program, feeds: dict[str, np.ndarray], weight: str, step: np.ndarray
) -> float:
    """Of the sum of the only output along a step of one weight."""
    sums = []
    for t in (1e-2, -1e-2):
        moved = {**program.weights, weight: program.weights[weight] + np.float32(t) * step}
        (y,) = reference.run(program.model, {**feeds, **moved}).values()
        sums.append(float(y.astype(np.float64).sum()))
    return (sums[0] - sums[1]) / 2e-2


def test_a_model_without_newer_operators_is_left_alone() -> None:
    model = build([node("Relu", ["x"], ["y"])], [IMAGE], ["y"], opset=22)
    assert decompose(model, {}) is model


@pytest.mark.parametrize(("a", "b", "expected"), [(5, 3, 2), (-5, 3, 1), (5, -3, -1)])
def test_the_remainder_of_floats_has_the_sign_of_the_divisor(a, b, expected) -> None:
    nodes = [node("Mod", ["x", "d"], ["y"])]
    model = build(nodes, [("x", [1])], ["y"], {"d": np.float32([b])}, 28)
    model = decompose(model, {"x": np.float32([a])})
    assert "Mod" not in {n.op_type for n in model.graph.node}
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", 20))
    assert reference.run(model, {"x": np.float32([a])})["y"] == pytest.approx([expected])


def test_a_truncated_or_whole_remainder_is_kept() -> None:
    truncated = build(
        [node("Mod", ["x", "x"], ["y"], fmod=1)], [("x", [1])], ["y"], opset=28
    )
    assert [
        n.op_type for n in decompose(truncated, {"x": np.ones(1, np.float32)}).graph.node
    ] == ["Mod"]


def test_a_definition_that_loops_is_refused() -> None:
    inputs = [(name, [1, 1, 4, 8]) for name in ("q", "k", "v")]
    attention = node(
        "LinearAttention", ["q", "k", "v"], ["y", "s"], q_num_heads=1, kv_num_heads=1
    )
    model = build([attention], inputs, ["y"], opset=27)
    with pytest.raises(GraphError, match="LinearAttention"):
        normalise(model, batch=1)


def masked(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    """Attention over x w with a mask of which the second row leaves nothing."""
    mask = np.zeros((3, 3), np.float32)
    mask[1] = mask[2, 0] = -np.inf
    before = [
        node("MatMul", ["x", "w"], ["q"]),
        node("MatMul", ["q", "t"], ["scores"]),
        node("Add", ["scores", "mask"], ["kept"]),
    ]
    after = [node("MatMul", ["p", "x"], ["y"])]
    tensors = {"w": normal(4, 4), "t": normal(4, 3, seed=1), "mask": mask,
               "zero": np.float32(0), "bottom": np.float32(-np.inf),
               "last": np.array([-1])}  # fmt: skip
    return build([*before, *nodes, *after], [("x", ["N", 3, 4])], ["y"], tensors)


CORRECTIONS = {
    "after the fact": [
        node("Softmax", ["kept"], ["s"], axis=-1),
        node("IsNaN", ["s"], ["empty"]),
        node("Where", ["empty", "zero", "s"], ["p"]),
    ],
    "by the mask": [
        node("ReduceMax", ["mask", "last"], ["top"]),
        node("Equal", ["top", "bottom"], ["empty"]),
        node("Softmax", ["kept"], ["s"]),
        node("Where", ["empty", "zero", "s"], ["p"]),
    ],
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_rows_of_which_nothing_is_left_have_no_value_and_no_slope(name: str) -> None:
    model = masked(CORRECTIONS[name])
    program = normalise(model, batch=2)
    expect_same(model, program)
    feeds = {"x": normal(2, 3, 4, seed=9)}
    (y,) = reference.run(program.model, {**feeds, **program.weights}).values()
    np.testing.assert_array_equal(y[:, 1], 0)
    again = onnx.ModelProto()
    again.CopyFrom(program.model)
    guard_masked_rows(again.graph)
    assert again == program.model
    found = gradients(program, feeds)
    assert np.isfinite(found["w"]).all()
    step = normal(4, 4, seed=7)
    expected = float((found["w"].astype(np.float64) * step).sum())
    assert slope(program, feeds, "w", step) == pytest.approx(expected, rel=0.02)


def test_a_softmax_that_nothing_corrects_is_left_alone() -> None:
    model = masked([node("Softmax", ["kept"], ["p"])])
    model.graph.initializer[2].CopyFrom(
        onnx.numpy_helper.from_array(np.zeros((3, 3), np.float32), "mask")
    )
    ops = [n.op_type for n in normalise(model, batch=2).model.graph.node]
    assert "Clip" not in ops
