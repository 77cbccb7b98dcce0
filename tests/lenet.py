"""LeNet-5 with ReLU and max pooling, as an ONNX file, and MNIST for it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.inputs import cached

WEIGHTS = {
    "conv1": (6, 1, 5, 5),
    "conv2": (16, 6, 5, 5),
    "fc1": (120, 400),
    "fc2": (84, 120),
    "fc3": (10, 84),
}


def lenet(seed: int = 0) -> onnx.ModelProto:
    """From ``x`` [N, 1, 28, 28] to ``logits`` [N, 10]; weights by He et al. 2015.

    Every node but ``logits`` is named after its one output, so cuts are easy to name.
    """
    rng = np.random.default_rng(seed)
    tensors = []
    for name, shape in WEIGHTS.items():
        deviation = math.sqrt(2 / math.prod(shape[1:]))
        weight = rng.normal(0, deviation, shape).astype(np.float32)
        tensors.append(numpy_helper.from_array(weight, f"{name}.weight"))
        tensors.append(numpy_helper.from_array(np.zeros(shape[0], np.float32), f"{name}.bias"))
    nodes = [
        *_block("x", "conv1", "pool1", pads=[2, 2, 2, 2]),
        *_block("pool1", "conv2", "pool2", pads=[0, 0, 0, 0]),
        helper.make_node("Flatten", ["pool2"], ["flat"]),
        _gemm("flat", "fc1", "fc1"),
        helper.make_node("Relu", ["fc1"], ["relu3"]),
        _gemm("relu3", "fc2", "fc2"),
        helper.make_node("Relu", ["fc2"], ["relu4"]),
        _gemm("relu4", "fc3", "logits"),
    ]
    graph = helper.make_graph(
        nodes,
        "lenet",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, 28, 28])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])],
        tensors,
    )
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8)


def write_mnist(folder: Path) -> tuple[Path, Path]:
    """The 4,000 and 1,000 digits of the fixed split, scaled to 0 ... 1."""
    paths = folder / "train.npz", folder / "eval.npz"
    for path, name in zip(paths, ("mnist5k_train.npz", "mnist5k_test.npz"), strict=True):
        with np.load(cached(name)) as arrays:
            np.savez(path, x=arrays["x"] / np.float32(255), labels=arrays["labels"])
    return paths


def _block(x: str, conv: str, pool: str, pads: list[int]) -> list[onnx.NodeProto]:
    relu = conv.replace("conv", "relu")
    weights = [f"{conv}.weight", f"{conv}.bias"]
    halves = {"kernel_shape": [2, 2], "strides": [2, 2]}
    return [
        helper.make_node("Conv", [x, *weights], [conv], pads=pads),
        helper.make_node("Relu", [conv], [relu]),
        helper.make_node("MaxPool", [relu], [pool], **halves),
    ]


def _gemm(x: str, name: str, output: str) -> onnx.NodeProto:
    weights = [f"{name}.weight", f"{name}.bias"]
    return helper.make_node("Gemm", [x, *weights], [output], transB=1)
