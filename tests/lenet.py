"""LeNet-5 with ReLU and max pooling, as an ONNX file, and MNIST for it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
from inputs import cached
from onnx import helper
from small_models import build

_SHAPES = {
    "conv1": (6, 1, 5, 5),
    "conv2": (16, 6, 5, 5),
    "fc1": (120, 400),
    "fc2": (84, 120),
    "fc3": (10, 84),
}


def lenet(seed: int = 0) -> onnx.ModelProto:
    """From ``x`` [N, 1, 28, 28] to ``logits`` [N, 10]; weights by He et al. 2015.

    The values between two nodes are ``conv1``, ``relu1``, ``pool1``, ``conv2``, ``relu2``,
    ``pool2``, ``flat``, ``fc1``, ``relu3``, ``fc2`` and ``relu4``: all valid cuts.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in _SHAPES.items():
        deviation = math.sqrt(2 / math.prod(shape[1:]))
        tensors[f"{name}.weight"] = rng.normal(0, deviation, shape).astype(np.float32)
        tensors[f"{name}.bias"] = np.zeros(shape[0], np.float32)
    nodes = [
        *_block("x", 1, pads=[2, 2, 2, 2]),
        *_block("pool1", 2, pads=[0, 0, 0, 0]),
        helper.make_node("Flatten", ["pool2"], ["flat"]),
        _gemm("flat", "fc1", "fc1"),
        helper.make_node("Relu", ["fc1"], ["relu3"]),
        _gemm("relu3", "fc2", "fc2"),
        helper.make_node("Relu", ["fc2"], ["relu4"]),
        _gemm("relu4", "fc3", "logits"),
    ]
    return build(nodes, [("x", ["N", 1, 28, 28])], ["logits"], tensors, opset=17)


def write_mnist(folder: Path) -> tuple[Path, Path]:
    """The fixed split as files: 4,000 digits to train, 1,000 to test, scaled to 0 ... 1."""
    paths = folder / "train.npz", folder / "eval.npz"
    for path, name in zip(paths, ("mnist5k_train.npz", "mnist5k_test.npz"), strict=True):
        with np.load(cached(name)) as arrays:
            np.savez(path, x=arrays["x"] / np.float32(255), labels=arrays["labels"])
    return paths


def _block(x: str, number: int, pads: list[int]) -> list[onnx.NodeProto]:
    conv, relu, pool = (f"{kind}{number}" for kind in ("conv", "relu", "pool"))
    halves = {"kernel_shape": [2, 2], "strides": [2, 2]}
    return [
        helper.make_node("Conv", [x, f"{conv}.weight", f"{conv}.bias"], [conv], pads=pads),
        helper.make_node("Relu", [conv], [relu]),
        helper.make_node("MaxPool", [relu], [pool], **halves),
    ]


def _gemm(x: str, name: str, output: str) -> onnx.NodeProto:
    weights = [f"{name}.weight", f"{name}.bias"]
    return helper.make_node("Gemm", [x, *weights], [output], transB=1)
