"""What the demo trains: a small CNN, and the digits it learns to read."""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgetrain.compiler.program import IR_VERSION, OPSET
from edgetrain.samples import Samples, order

CLASSES: Final = 10
EVAL_PER_CLASS: Final = 36
_PIXEL_MAX: Final = 16


def digits() -> tuple[Samples, Samples]:
    """The 1,797 digits, split once and for all: 36 of each class, drawn at random, to test.

    Returns:
        Training and test samples: ``image``, float32 [samples, 1, 8, 8] in 0 ... 1, and
        labels, int64 [samples].
    """
    asset = resources.files("coordinator").joinpath("assets", "digits.npz")
    with asset.open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        image = arrays["image"].astype(np.float32) / np.float32(_PIXEL_MAX)
        labels = arrays["labels"].astype(np.int64)
    everything = Samples({"image": image}, labels, "digits")
    rows = order(len(everything), epoch=0, seed=0, shuffle=True)
    drawn = [rows[labels[rows] == label][:EVAL_PER_CLASS] for label in range(CLASSES)]
    test = np.isin(rows, np.concatenate(drawn))
    return everything.take(rows[~test]), everything.take(rows[test])


def write_digits(folder: Path) -> tuple[Path, Path]:
    """Write the two parts as ``train.npz`` and ``eval.npz``, the format users bring."""
    paths = folder / "train.npz", folder / "eval.npz"
    for path, samples in zip(paths, digits(), strict=True):
        with path.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **samples.arrays())
    return paths


def digits_model(seed: int = 0) -> onnx.ModelProto:
    """A CNN from ``image`` [N, 1, 8, 8] to ``logits`` [N, 10], not trained.

    It is a chain, so the value between any two nodes is a valid cut.

    Args:
        seed: of the weights, which follow He et al. 2015: normal, variance 2 / fan-in.
    """
    rng = np.random.default_rng(seed)
    weights = {
        "conv1.weight": _he(rng, 16, 1, 3, 3),
        "conv2.weight": _he(rng, 32, 16, 3, 3),
        "dense1.weight": _he(rng, 64, 32 * 4 * 4),
        "dense2.weight": _he(rng, CLASSES, 64),
    }
    for name in list(weights):
        bias = name.replace("weight", "bias")
        weights[bias] = np.zeros(weights[name].shape[0], np.float32)
    graph = helper.make_graph(
        _nodes(),
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="edgetrain",
    )


def _he(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    deviation = math.sqrt(2 / math.prod(shape[1:]))
    return rng.normal(0, deviation, shape).astype(np.float32)


def _nodes() -> list[onnx.NodeProto]:
    node = helper.make_node
    conv1 = ["image", "conv1.weight", "conv1.bias"]
    conv2 = ["relu1", "conv2.weight", "conv2.bias"]
    dense1 = ["flat", "dense1.weight", "dense1.bias"]
    dense2 = ["relu3", "dense2.weight", "dense2.bias"]
    return [
        node("Conv", conv1, ["conv1"], "conv1", pads=[1, 1, 1, 1]),
        node("Relu", ["conv1"], ["relu1"], "relu1"),
        node("Conv", conv2, ["conv2"], "conv2", pads=[1, 1, 1, 1]),
        node("Relu", ["conv2"], ["relu2"], "relu2"),
        node("MaxPool", ["relu2"], ["pool"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", ["pool"], ["flat"], "flat"),
        node("Gemm", dense1, ["dense1"], "dense1", transB=1),
        node("Relu", ["dense1"], ["relu3"], "relu3"),
        node("Gemm", dense2, ["logits"], "dense2", transB=1),
    ]
