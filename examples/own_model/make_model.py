"""Writes what a user brings: a model.onnx with untrained weights, train.npz and eval.npz.

Run as ``python make_model.py [FOLDER]``. The model is a small network for 8 x 8 images of
handwritten digits; the data is the set that the demo uses. An export from PyTorch
(`torch.onnx.export`) or any other tool serves as well.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HELD_OUT = 360
HIDDEN = (48, 32)


def model(seed: int = 0) -> onnx.ModelProto:
    """Dense layers from ``pixels`` [N, 64] to ``scores`` [N, 10]."""
    rng = np.random.default_rng(seed)
    sizes = (64, *HIDDEN, 10)
    nodes, weights = [], []
    value = "pixels"
    for i in range(len(sizes) - 1):
        deviation = np.sqrt(2 / sizes[i])
        matrix = rng.normal(0, deviation, (sizes[i], sizes[i + 1])).astype(np.float32)
        bias = np.zeros(sizes[i + 1], np.float32)
        weights.append(numpy_helper.from_array(matrix, f"dense{i}.weight"))
        weights.append(numpy_helper.from_array(bias, f"dense{i}.bias"))
        last = i == len(sizes) - 2
        result = "scores" if last else f"dense{i}"
        inputs = [value, f"dense{i}.weight", f"dense{i}.bias"]
        nodes.append(helper.make_node("Gemm", inputs, [result]))
        if not last:
            nodes.append(helper.make_node("Relu", [result], [f"relu{i}"]))
            value = f"relu{i}"
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["N", 64])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])
    graph = helper.make_graph(nodes, "own_model", [pixels], [scores], weights)
    opsets = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def write_data(folder: Path, seed: int = 0) -> None:
    """Arrays named as the model's input, and ``labels``."""
    asset = resources.files("coordinator") / "assets" / "digits.npz"
    with asset.open("rb") as file:
        digits = np.load(file)
        images, labels = digits["image"], digits["labels"]
    pixels = images.reshape(len(images), 64).astype(np.float32) / 16
    rows = np.random.default_rng(seed).permutation(len(labels))
    parts = {"eval.npz": rows[:HELD_OUT], "train.npz": rows[HELD_OUT:]}
    for name, part in parts.items():
        np.savez(folder / name, pixels=pixels[part], labels=labels[part].astype(np.int64))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    onnx.save(model(), folder / "model.onnx")
    write_data(folder)


if __name__ == "__main__":
    main()
