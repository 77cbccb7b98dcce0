"""Inputs that are no data become constants; branches on shapes are taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from normal_form import expect_form, expect_same, outputs_of
from onnx import TensorProto, helper
from small_models import build, normal

from coordinator.job import prepare
from edgetrain.compiler import reference
from edgetrain.compiler.export import differences
from edgetrain.compiler.normalise import normalise
from edgetrain.config import DataConfig, ModelConfig, RunConfig
from edgetrain.errors import GraphError
from edgetrain.train_config import TrainConfig

node = helper.make_node


def stateful() -> onnx.ModelProto:
    """x [N, 3] and state [2, N, 3] -> (x @ w) * rate + state[0] + state[1]."""
    return build(
        [
            node("MatMul", ["x", "w"], ["a"]),
            node("Mul", ["a", "rate"], ["b"]),
            node("ReduceSum", ["state", "axis"], ["s"], keepdims=0),
            node("Add", ["b", "s"], ["y"]),
        ],
        [("x", ["N", 3]), ("state", [2, "N", 3]), ("rate", [])],
        ["y"],
        {"w": normal(3, 3), "axis": np.asarray([0])},
    )


def test_a_fixed_input_has_its_value_in_every_element() -> None:
    model = stateful()
    program = normalise(model, batch=4, fixed={"state": 0.25, "rate": 2})
    expect_form(program)
    assert [spec.name for spec in program.inputs] == ["x"]
    assert list(program.weights) == ["w"]
    x = normal(4, 3, seed=1)
    feeds = {
        "x": x,
        "state": np.full((2, 4, 3), 0.25, np.float32),
        "rate": np.asarray(2, np.float32),
    }
    np.testing.assert_allclose(
        outputs_of(program, {"x": x})["y"], reference.run(model, feeds)["y"], rtol=1e-6
    )


def test_who_leaves_them_open_is_told_of_them() -> None:
    with pytest.raises(GraphError, match=r"'state'.*dynamic.*\[model\] fixed"):
        normalise(stateful(), batch=4, fixed={"rate": 1})
    with pytest.raises(GraphError, match=r"'state' takes 2.*\[model\] fixed"):
        normalise(stateful(), batch=4, fixed={"rate": 1}, shapes={"state": (4, 3)})


def test_a_value_for_no_input_is_refused() -> None:
    with pytest.raises(GraphError, match=r"'speed', which is not an input.*'rate'"):
        normalise(stateful(), batch=4, fixed={"speed": 1})


def branch(op: str, *inputs: str) -> onnx.GraphProto:
    """A graph of one node, which reads what it captures."""
    name = f"{op} of {inputs[1]}"
    out = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    return helper.make_graph([node(op, inputs, [name])], name, [], [out])


def test_a_branch_on_the_shape_that_another_branch_gives_is_taken() -> None:
    model = build(
        [
            node("Shape", ["x"], ["shape1"]),
            node("Gather", ["shape1", "one"], ["width1"]),
            node("Equal", ["width1", "three"], ["narrow1"]),
            node(
                "If",
                ["narrow1"],
                ["first"],
                then_branch=branch("MatMul", "x", "widen"),
                else_branch=branch("Add", "x", "shift"),
            ),
            node("Shape", ["first"], ["shape2"]),
            node("Gather", ["shape2", "one"], ["width2"]),
            node("Equal", ["width2", "three"], ["narrow2"]),
            node(
                "If",
                ["narrow2"],
                ["y"],
                then_branch=branch("Mul", "first", "factor"),
                else_branch=branch("Sub", "first", "bias"),
            ),
        ],
        [("x", ["N", 3])],
        ["y"],
        {
            "widen": normal(3, 5),
            "shift": normal(3),
            "factor": normal(3),
            "bias": normal(5),
            "one": np.asarray(1),
            "three": np.asarray(3),
        },
    )
    program = normalise(model, batch=2)
    expect_form(program)
    expect_same(model, program)
    assert [n.op_type for n in program.model.graph.node] == ["MatMul", "Sub"]
    assert set(program.weights) == {"widen", "bias"}
    assert any("shift, factor" in remark for remark in program.remarks)


def test_a_run_file_fixes_inputs(tmp_path: Path) -> None:
    onnx.save(stateful(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=normal(8, 3), labels=normal(8, 3))
    fixed = {"state": 0.0, "rate": 1.0}
    job = prepare(
        RunConfig(
            ModelConfig(tmp_path / "model.onnx", loss="mse", fixed=fixed),
            DataConfig(tmp_path / "data.npz"),
            TrainConfig(steps=1, batch_size=4, microbatches=2),
        )
    )
    assert [spec.shape for spec in job.program.inputs] == [(2, 3)]
    job.export(tmp_path / "trained.onnx", {"w": normal(3, 3, seed=5)})
    assert differences(stateful(), onnx.load(tmp_path / "trained.onnx")) == []
