"""Models that ask for more than any device has are refused before room is made for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_models import build, convnet, mlp, normal

from edgetrain.compiler import limits, reference
from edgetrain.compiler.normalise import normalise
from edgetrain.errors import EngineError, GraphError

SCRIPTS = Path(__file__).parent.parent / "scripts"

node = helper.make_node


def refusal(model: onnx.ModelProto) -> str:
    with pytest.raises(GraphError) as info:
        normalise(model, batch=2)
    return str(info.value)


def with_first(kind: str, sizes: list[int]) -> onnx.ModelProto:
    """A convolutional net whose input passes a node that gives it a size."""
    model = convnet(13)
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(sizes), "sizes"))
    for reader in model.graph.node:
        reader.input[:] = ["sized" if name == "x" else name for name in reader.input]
    model.graph.node.insert(0, node(kind, ["x", "sizes"], ["sized"]))
    return model


@pytest.mark.parametrize("sizes", [[1, 1, 2**40, 1], [1, 1, 2**18, 2**18], [1, 1, 64, 700]])
def test_values_that_no_device_could_hold(sizes: list[int]) -> None:
    text = refusal(with_first("Tile", sizes))
    assert "'sized'" in text
    assert "GB" in text


def test_an_input_that_no_device_could_hold() -> None:
    model = mlp()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 2**40
    assert "'x' of shape" in refusal(model)


def test_a_filling_without_end() -> None:
    model = mlp()
    model.graph.initializer.append(numpy_helper.from_array(np.asarray([2**50]), "many"))
    model.graph.node.insert(0, node("ConstantOfShape", ["many"], ["filled"]))
    model.graph.node.append(node("Add", ["y", "filled"], ["z"]))
    model.graph.output[0].name = "z"
    assert "'filled' of shape" in refusal(model)


def test_a_window_without_end() -> None:
    model = build(
        [
            node("Conv", ["x", "w"], ["c"]),
            node("MaxPool", ["c"], ["y"], kernel_shape=[2, 2**31], auto_pad="SAME_UPPER"),
        ],
        [("x", ["N", 1, 4, 4])],
        ["y"],
        {"w": normal(1, 1, 1, 1)},
    )
    assert "window of [2, 2147483648] elements" in refusal(model)


def run_small_model() -> None:
    """In a process of its own, as the first that runs anything decides on its memory."""
    model = build([node("Expand", ["x", "n"], ["y"])], [("x", [1]), ("n", [1])], ["y"])
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.INT64
    x = np.ones(1, np.float32)
    most = limits.MAX_RUN_BYTES // x.itemsize
    assert len(reference.run(model, {"x": x, "n": np.asarray([1000])})["y"]) == 1000
    with pytest.raises(EngineError, match="memory"):
        reference.run(model, {"x": x, "n": np.asarray([most + 1])})


def test_a_run_of_a_small_model_has_a_bound() -> None:
    code = f"import {__name__} as here; here.run_small_model(); print('bounded')"
    folders = os.pathsep.join([str(Path(__file__).parent), str(SCRIPTS)])
    done = subprocess.run(  # noqa: S603 - this file, in a fresh interpreter
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "bounded", done.stderr


@pytest.mark.parametrize("target", [[0, 0], [2, -1, 0], [-1, -1], [7, 7]])
def test_impossible_and_empty_reshapes(target: list[int]) -> None:
    assert refusal(with_first("Reshape", target))


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ([], limits.SMALL_VALUE_BYTES),
        ([1 << 18], 1000 << 18),
        ([1 << 20, 1 << 20], limits.MAX_VALUE_BYTES),
        ([3 << 30, 1], 3 << 30),
    ],
)
def test_a_value_may_outgrow_what_it_is_made_of(given: list[int], most: int) -> None:
    assert limits.most_bytes(given) == most


def test_an_empty_value_may_not_be_long_either() -> None:
    with pytest.raises(GraphError, match="GB"):
        limits.check_extents("x", [0, 2**45], 4)
    limits.check_extents("x", [0, 3], 4)
