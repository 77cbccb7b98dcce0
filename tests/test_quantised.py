"""Of a quantised model the weights behind the last rounding train; the others stay."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from normal_form import expect_form, expect_same
from onnx import helper
from small_models import build, mlp, normal

from edgetrain.compiler import quantised
from edgetrain.compiler.export import differences, export
from edgetrain.compiler.normalise import normalise
from edgetrain.errors import GraphError

node = helper.make_node


def qdq(tail: bool) -> onnx.ModelProto:
    """x [N, 4] -> MatMul, round, MatMul by int8 weights, and a float MatMul if `tail`."""
    nodes = [
        node("MatMul", ["x", "first"], ["a"]),
        node("QuantizeLinear", ["a", "step", "zero"], ["q"]),
        node("DequantizeLinear", ["q", "step", "zero"], ["d"]),
        node("DequantizeLinear", ["int8", "step", "zero"], ["second"]),
        node("MatMul", ["d", "second"], ["b"]),
    ]
    integers = np.random.default_rng(0).integers(-100, 100, (4, 4)).astype(np.int8)
    tensors = {
        "first": normal(4, 4),
        "step": np.asarray(0.05, np.float32),
        "zero": np.asarray(0, np.int8),
        "int8": integers,
    }
    if tail:
        nodes.append(node("MatMul", ["b", "last"], ["c"]))
        nodes.append(node("Add", ["c", "bias"], ["y"]))
        tensors |= {"last": normal(4, 2, seed=1), "bias": normal(2, seed=2)}
    return build(nodes, [("x", ["N", 4])], ["y" if tail else "b"], tensors)


def test_what_follows_the_last_rounding_trains() -> None:
    model = qdq(tail=True)
    program = normalise(model, batch=2)
    expect_form(program)
    expect_same(model, program)
    assert set(program.weights) == {"last", "bias"}
    assert "constant in training: 1 tensors" in program.remarks[0]
    assert program.remarks[1].startswith("Constant in training, as a rounding")
    assert "first" in program.remarks[1]
    assert len(program.remarks) == 2
    new = {name: value + 1 for name, value in program.weights.items()}
    assert differences(model, export(model, program, new)) == []


def test_a_model_without_float_weights_is_refused_with_the_way_out() -> None:
    with pytest.raises(GraphError, match=r"quantised \(1 tensors\).*train the float model"):
        normalise(qdq(tail=False), batch=2)


@pytest.mark.parametrize("op", ["MatMulNBits", "QGemm", "DynamicQuantizeLSTM"])
def test_quantised_ops_of_the_runtime_are_refused_with_the_way_out(op: str) -> None:
    model = mlp()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    model.graph.node.append(node(op, ["x"], ["z"], domain="com.microsoft"))
    with pytest.raises(GraphError, match=f"quantised op {op}.*train the float model"):
        normalise(model, batch=2)


@given(
    edges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=14),
    rounding=st.sets(st.integers(1, 10), max_size=3),
)
def test_values_before_a_rounding_are_those_with_a_path_to_one(edges, rounding) -> None:
    readers = {i: {a for a, b in edges if a < i and b + 1 == i} | {0} for i in range(1, 11)}
    nodes = [
        node(
            "QuantizeLinear" if i in rounding else "Sum",
            [f"v{a}" for a in froms],
            [f"v{i}"],
        )
        for i, froms in readers.items()
    ]
    graph = helper.make_graph(nodes, "paths", [], [])

    def reaches(value: int) -> bool:
        return any(
            value in froms and (i in rounding or reaches(i)) for i, froms in readers.items()
        )

    expected = {f"v{i}" for i in range(11) if reaches(i)}
    assert quantised.before_rounding(graph) == expected
