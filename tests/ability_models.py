"""The models that an engine is probed with, as they are written out in ONNX."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE = 2
node = helper.make_node
Shapes = dict[str, tuple[int, ...]]


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Shapes,
    outputs: Shapes,
    tensors: dict[str, np.ndarray],
) -> bytes:
    graph = helper.make_graph(
        nodes,
        "p",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
            for n, s in outputs.items()
        ],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    opset = [helper.make_opsetid("", 20)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def backward() -> bytes:
    """Of a rectifier, a dense layer, a strided convolution, and a Gather."""
    square = (SIDE, SIDE)
    nodes = [
        node("Greater", ["x", "0"], ["a"]),
        node("Cast", ["a"], ["m"], to=TensorProto.FLOAT),
        node("Mul", ["d", "m"], ["z"]),
        node("ReduceSum", ["z", "first"], ["db"], keepdims=0),
        node("Transpose", ["x"], ["t"], perm=[1, 0]),
        node("MatMul", ["t", "z"], ["dw"]),
        node("Reshape", ["z", "image"], ["i"]),
        node("ConvTranspose", ["i", "k"], ["dx"], strides=[2, 2]),
        node("GatherElements", ["z", "turn"], ["g"], axis=0),
        node("ScatterElements", ["e", "turn", "g"], ["ds"], axis=0, reduction="add"),
    ]
    tensors = {
        "0": np.zeros((), np.float32),
        "first": np.zeros(1, np.int64),
        "image": np.asarray([1, 1, SIDE, SIDE]),
        "k": np.ones((1, 1, 2, 2), np.float32),
        "turn": np.asarray([[1, 1], [0, 0]]),
        "e": np.zeros(square, np.float32),
    }
    outputs = {
        "db": (SIDE,),
        "dw": square,
        "dx": (1, 1, 2 * SIDE, 2 * SIDE),
        "ds": square,
    }
    return _model(nodes, {"x": square, "d": square}, outputs, tensors)


def jvp() -> bytes:
    """Of Softmax(Tanh(x w)), along a tangent of x."""
    square = (SIDE, SIDE)
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Tanh", ["h"], ["y"]),
        node("MatMul", ["t", "w"], ["th"]),
        node("Mul", ["y", "y"], ["yy"]),
        node("Sub", ["1", "yy"], ["s"]),
        node("Mul", ["th", "s"], ["ty"]),
        node("Softmax", ["y"], ["p"], axis=1),
        node("Mul", ["p", "ty"], ["pt"]),
        node("ReduceSum", ["pt", "last"], ["r"], keepdims=1),
        node("Mul", ["p", "r"], ["q"]),
        node("Sub", ["pt", "q"], ["tp"]),
    ]
    tensors = {
        "w": np.asarray([[1, -1], [0.5, 2]], np.float32),
        "1": np.ones((), np.float32),
        "last": np.ones(1, np.int64),
    }
    return _model(nodes, {"x": square, "t": square}, {"p": square, "tp": square}, tensors)


def weights() -> bytes:
    """A product and a convolution with weights that are inputs."""
    square, image = (SIDE, SIDE), (1, 1, SIDE, SIDE)
    nodes = [
        node("MatMul", ["x", "w"], ["y"]),
        node("Reshape", ["x", "image"], ["i"]),
        node("Conv", ["i", "k"], ["c"]),
    ]
    inputs = {"x": square, "w": square, "k": image}
    return _model(
        nodes, inputs, {"y": square, "c": (1, 1, 1, 1)}, {"image": np.asarray(image)}
    )
