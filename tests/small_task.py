"""A task of a few milliseconds a step: three clouds of points, and a net for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from small_models import build, normal

CLASSES = 3


def two_layers() -> onnx.ModelProto:
    """x [N, 4] -> Gemm, Relu, Gemm -> y [N, 3]; `r` is the one valid cut."""
    node = helper.make_node
    return build(
        [
            node("Gemm", ["x", "w1", "b1"], ["h"], "first"),
            node("Relu", ["h"], ["r"], "relu"),
            node("Gemm", ["r", "w2", "b2"], ["y"], "second"),
        ],
        [("x", ["N", 4])],
        ["y"],
        {
            "w1": 0.5 * normal(4, 16),
            "b1": np.zeros(16, np.float32),
            "w2": 0.25 * normal(16, CLASSES, seed=1),
            "b2": np.zeros(CLASSES, np.float32),
        },
    )


def hard_coded(rows: int) -> onnx.ModelProto:
    """`two_layers` that runs with `rows` samples only: it flattens its hidden values."""
    model = two_layers()
    graph = model.graph
    first, relu, second = graph.node
    relu.input[0], relu.output[0] = "hf", "rf"
    flat = helper.make_node("Reshape", ["h", "flat"], ["hf"], "flat")
    back = helper.make_node("Reshape", ["rf", "back"], ["r"], "back")
    nodes = [first, flat, relu, back, second]
    del graph.node[:]
    graph.node.extend(nodes)
    for name, target in (("flat", [rows * 16]), ("back", [rows, 16])):
        graph.initializer.append(numpy_helper.from_array(np.asarray(target), name))
    graph.input[0].type.tensor_type.shape.dim[0].dim_value = rows
    return model


def determinant() -> onnx.ModelProto:
    """As `two_layers`, but what lies between the layers is an op without a rule."""
    node = helper.make_node
    return build(
        [
            node("Gemm", ["x", "w1"], ["h"], "first"),
            node("Reshape", ["h", "square"], ["s"], "square"),
            node("Det", ["s"], ["d"], "volume"),
            node("Reshape", ["d", "column"], ["c"], "column"),
            node("Gemm", ["c", "w2"], ["y"], "second"),
        ],
        [("x", ["N", 4])],
        ["y"],
        {
            "w1": normal(4, 4),
            "square": np.asarray([-1, 2, 2], np.int64),
            "column": np.asarray([-1, 1], np.int64),
            "w2": normal(1, CLASSES, seed=1),
        },
    )


def blobs(samples: int, seed: int = 0) -> dict[str, np.ndarray]:
    """`x` float32 [samples, 4], `labels` int64 [samples]; easy to tell apart."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, samples)
    centres = 2 * np.eye(CLASSES, 4, dtype=np.float32)
    noise = rng.standard_normal((samples, 4)).astype(np.float32)
    return {"x": centres[labels] + 0.3 * noise, "labels": labels}


def run_table() -> dict[str, Any]:
    """A run of 18 steps on ``m.onnx``, ``train.npz`` and ``eval.npz``."""
    return {
        "model": {"path": "m.onnx"},
        "data": {"train": "train.npz", "eval": "eval.npz"},
        "train": {"epochs": 6, "batch_size": 32, "optimizer": "adam", "lr": 0.03},
        "plan": {"stages": "all"},
    }


def split_password(url: str) -> tuple[str, str]:
    """A broker's URL without its password, and the password."""
    head, _, host = url.partition("@")
    user, _, password = head.rpartition(":")
    return f"{user}@{host}", password


def write_small_task(folder: Path) -> None:
    """Its model and its samples, as `run_table` names them."""
    onnx.save(two_layers(), folder / "m.onnx")
    np.savez(folder / "train.npz", **blobs(192))
    np.savez(folder / "eval.npz", **blobs(96, seed=1))
