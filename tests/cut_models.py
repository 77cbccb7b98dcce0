"""Small models of every shape that a cut can meet, normalised for a microbatch of four."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from tests.small_models import build, normal

BATCH = 4
CLASSES = 5
node = helper.make_node


def scaled(*shape: int, seed: int = 0) -> np.ndarray:
    """A weight that keeps activations near one."""
    fan_in = int(np.prod(shape[1:])) if len(shape) > 2 else shape[0]
    return normal(*shape, seed=seed) / np.float32(np.sqrt(fan_in))


def chain() -> onnx.ModelProto:
    """Convolutions, pooling, dense layers."""
    return build(
        [
            node("Conv", ["x", "c1", "b1"], ["h1"], pads=[1, 1, 1, 1]),
            node("Relu", ["h1"], ["r1"]),
            node("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
            node("Conv", ["p1", "c2"], ["h2"], pads=[1, 1, 1, 1]),
            node("Tanh", ["h2"], ["r2"]),
            node("Flatten", ["r2"], ["f"]),
            node("Gemm", ["f", "w3", "b3"], ["h3"]),
            node("Relu", ["h3"], ["r3"]),
            node("Gemm", ["r3", "w4", "b4"], ["y"], transB=1),
        ],
        [("x", ["N", 2, 6, 6])],
        ["y"],
        {
            "c1": scaled(4, 2, 3, 3),
            "b1": 0.1 * normal(4, seed=1),
            "c2": scaled(3, 4, 3, 3, seed=2),
            "w3": scaled(27, 8, seed=3),
            "b3": 0.1 * normal(8, seed=4),
            "w4": scaled(CLASSES, 8, seed=5),
            "b4": 0.1 * normal(CLASSES, seed=6),
        },
    )


def _norm(name: str, channels: int, seed: int) -> dict[str, np.ndarray]:
    noise = 0.1 * normal(4, channels, seed=seed)
    return {
        f"{name}.s": 1 + noise[0],
        f"{name}.b": noise[1],
        f"{name}.m": noise[2],
        f"{name}.v": np.exp(noise[3]),
    }


def _batch_norm(x: str, name: str) -> onnx.NodeProto:
    parts = [f"{name}.{part}" for part in "sbmv"]
    return node("BatchNormalization", [x, *parts], [f"{name}.y"], name, momentum=0.8)


def residual() -> onnx.ModelProto:
    """Convolutions with BatchNormalization around a skip connection."""
    return build(
        [
            node("Conv", ["x", "c0"], ["h0"], pads=[1, 1, 1, 1]),
            _batch_norm("h0", "n0"),
            node("Relu", ["n0.y"], ["r0"]),
            node("Conv", ["r0", "c1"], ["h1"], pads=[1, 1, 1, 1]),
            _batch_norm("h1", "n1"),
            node("Relu", ["n1.y"], ["r1"]),
            node("Conv", ["r1", "c2"], ["h2"], pads=[1, 1, 1, 1]),
            _batch_norm("h2", "n2"),
            node("Add", ["n2.y", "r0"], ["sum"]),
            node("Relu", ["sum"], ["r2"]),
            node("GlobalAveragePool", ["r2"], ["g"]),
            node("Flatten", ["g"], ["f"]),
            node("Gemm", ["f", "w", "b"], ["y"]),
        ],
        [("x", ["N", 2, 5, 5])],
        ["y"],
        {
            "c0": scaled(4, 2, 3, 3),
            "c1": scaled(4, 4, 3, 3, seed=1),
            "c2": scaled(4, 4, 3, 3, seed=2),
            "w": scaled(4, CLASSES, seed=3),
            "b": 0.1 * normal(CLASSES, seed=4),
            **_norm("n0", 4, 5),
            **_norm("n1", 4, 6),
            **_norm("n2", 4, 7),
        },
    )


def mobile() -> onnx.ModelProto:
    """An inverted bottleneck: expand, depthwise, project."""
    return build(
        [
            node("Conv", ["x", "c0"], ["h0"]),
            _batch_norm("h0", "n0"),
            node("Clip", ["n0.y", "zero", "six"], ["r0"]),
            node("Conv", ["r0", "c1"], ["h1"], pads=[1, 1, 1, 1], group=6, strides=[2, 2]),
            _batch_norm("h1", "n1"),
            node("Clip", ["n1.y", "zero", "six"], ["r1"]),
            node("Conv", ["r1", "c2"], ["h2"]),
            _batch_norm("h2", "n2"),
            node("ReduceMean", ["n2.y", "axes"], ["g"], keepdims=0),
            node("Gemm", ["g", "w"], ["z"]),
            node("Softmax", ["z"], ["y"], axis=-1),
        ],
        [("x", ["N", 2, 6, 6])],
        ["y"],
        {
            "zero": np.float32(0),
            "six": np.float32(6),
            "axes": np.asarray([2, 3], np.int64),
            "c0": scaled(6, 2, 1, 1),
            "c1": scaled(6, 1, 3, 3, seed=1),
            "c2": scaled(4, 6, 1, 1, seed=2),
            "w": scaled(4, CLASSES, seed=3),
            **_norm("n0", 6, 5),
            **_norm("n1", 6, 6),
            **_norm("n2", 4, 7),
        },
    )


def encoder() -> onnx.ModelProto:
    """One attention layer; its weights are prepared by Transposes at the very start."""
    heads = np.asarray([0, 0, 2, 4], np.int64)
    return build(
        [
            node("Transpose", ["wf1"], ["wf1.t"], perm=[1, 0]),
            node("Transpose", ["wf2"], ["wf2.t"], perm=[1, 0]),
            node("MatMul", ["x", "we"], ["e"]),
            *_attention(),
            node("Add", ["e", "o"], ["res1"]),
            node("LayerNormalization", ["res1", "l1.s", "l1.b"], ["a"], axis=-1),
            node("MatMul", ["a", "wf1.t"], ["f1"]),
            node("Add", ["f1", "bf1"], ["f1b"]),
            node("Gelu", ["f1b"], ["gelu"]),
            node("MatMul", ["gelu", "wf2.t"], ["f2"]),
            node("Add", ["a", "f2"], ["res2"]),
            node("LayerNormalization", ["res2", "l2.s", "l2.b"], ["n"], axis=-1),
            node("ReduceMean", ["n", "one"], ["mean"], keepdims=0),
            node("Gemm", ["mean", "wh", "bh"], ["y"]),
        ],
        [("x", ["N", 3, 6])],
        ["y"],
        {
            "heads": heads,
            "whole": np.asarray([0, 0, 8], np.int64),
            "half": np.float32(0.5),
            "one": np.asarray([1], np.int64),
            "we": scaled(6, 8),
            **{f"w{n}": scaled(8, 8, seed=i + 1) for i, n in enumerate("qkvo")},
            "l1.s": 1 + 0.1 * normal(8, seed=6),
            "l1.b": 0.1 * normal(8, seed=7),
            "wf1": scaled(12, 8, seed=8),
            "bf1": 0.1 * normal(12, seed=9),
            "wf2": scaled(8, 12, seed=10),
            "l2.s": 1 + 0.1 * normal(8, seed=11),
            "l2.b": 0.1 * normal(8, seed=12),
            "wh": scaled(8, CLASSES, seed=13),
            "bh": 0.1 * normal(CLASSES, seed=14),
        },
    )


def stream() -> onnx.ModelProto:
    """Two residual branches on one stream, each normalised at its start."""
    nodes, weights = [node("MatMul", ["x", "we"], ["s0"])], {"we": scaled(6, 8)}
    for i in range(2):
        nodes += [
            node("LayerNormalization", [f"s{i}", f"g{i}", f"h{i}"], [f"n{i}"], axis=-1),
            node("MatMul", [f"n{i}", f"wa{i}"], [f"a{i}"]),
            node("Gelu", [f"a{i}"], [f"u{i}"]),
            node("MatMul", [f"u{i}", f"wb{i}"], [f"v{i}"]),
            node("Add", [f"v{i}", f"bb{i}"], [f"b{i}"]),
            node("Add", [f"s{i}", f"b{i}"], [f"s{i + 1}"]),
        ]
        weights |= {
            f"g{i}": 1 + 0.1 * normal(8, seed=6 + i),
            f"h{i}": 0.1 * normal(8, seed=8 + i),
            f"wa{i}": scaled(8, 12, seed=1 + i),
            f"wb{i}": scaled(12, 8, seed=3 + i),
            f"bb{i}": 0.1 * normal(8, seed=5 + i),
        }
    nodes += [
        node("ReduceMean", ["s2", "one"], ["mean"], keepdims=0),
        node("Gemm", ["mean", "wh", "bh"], ["y"]),
    ]
    weights |= {
        "one": np.asarray([1], np.int64),
        "wh": scaled(8, CLASSES, seed=13),
        "bh": 0.1 * normal(CLASSES, seed=14),
    }
    return build(nodes, [("x", ["N", 3, 6])], ["y"], weights)


def _attention() -> list[onnx.NodeProto]:
    nodes = []
    for name in "qkv":
        perm = [0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]
        nodes += [
            node("MatMul", ["e", f"w{name}"], [name]),
            node("Reshape", [name, "heads"], [f"{name}.split"]),
            node("Transpose", [f"{name}.split"], [f"{name}.heads"], perm=perm),
        ]
    return [
        *nodes,
        node("MatMul", ["q.heads", "k.heads"], ["raw"]),
        node("Mul", ["raw", "half"], ["scores"]),
        node("Softmax", ["scores"], ["p"], axis=-1),
        node("MatMul", ["p", "v.heads"], ["mixed"]),
        node("Transpose", ["mixed"], ["mixed.back"], perm=[0, 2, 1, 3]),
        node("Reshape", ["mixed.back", "whole"], ["joined"]),
        node("MatMul", ["joined", "wo"], ["o"]),
    ]


def late_input() -> onnx.ModelProto:
    """The second data input is needed only by the last layer."""
    return build(
        [
            node("Gemm", ["x", "w1"], ["h1"]),
            node("Sigmoid", ["h1"], ["r1"]),
            node("Gemm", ["r1", "w2"], ["h2"]),
            node("Tanh", ["h2"], ["r2"]),
            node("Concat", ["r2", "z"], ["c"], axis=1),
            node("Gemm", ["c", "w3"], ["y"]),
        ],
        [("x", ["N", 6]), ("z", ["N", 3])],
        ["y"],
        {"w1": scaled(6, 8), "w2": scaled(8, 7, seed=1), "w3": scaled(10, 5, seed=2)},
    )


def tokens() -> onnx.ModelProto:
    """Integer tokens, an embedding, two dense layers."""
    model = build(
        [
            node("Gather", ["emb", "x"], ["e"]),
            node("MatMul", ["e", "w1"], ["h1"]),
            node("Relu", ["h1"], ["r1"]),
            node("ReduceMean", ["r1", "one"], ["m"], keepdims=0),
            node("Gemm", ["m", "w2"], ["h2"]),
            node("Tanh", ["h2"], ["r2"]),
            node("Gemm", ["r2", "w3"], ["y"]),
        ],
        [("x", ["N", 7])],
        ["y"],
        {
            "one": np.asarray([1], np.int64),
            "emb": normal(11, 6),
            "w1": scaled(6, 8, seed=1),
            "w2": scaled(8, 6, seed=2),
            "w3": scaled(6, CLASSES, seed=3),
        },
    )
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    return model


def early_output() -> onnx.ModelProto:
    """Two outputs of one shape: `first` is made in the first layer, `y` in the last."""
    return build(
        [
            node("Gemm", ["x", "w1"], ["first"]),
            node("Relu", ["first"], ["r1"]),
            node("Gemm", ["r1", "w2"], ["h2"]),
            node("Tanh", ["h2"], ["r2"]),
            node("Gemm", ["r2", "w3"], ["y"]),
        ],
        [("x", ["N", 6])],
        ["first", "y"],
        {"w1": scaled(6, 5), "w2": scaled(5, 7, seed=1), "w3": scaled(7, 5, seed=2)},
    )


def deep() -> onnx.ModelProto:
    """Six dense layers with Tanh between: smooth everywhere."""
    widths = [6, 7, 6, 7, 8, 7, CLASSES]
    nodes, tensors, value = [], {}, "x"
    for layer in range(6):
        weight, bias = f"w{layer}", f"b{layer}"
        tensors[weight] = scaled(widths[layer], widths[layer + 1], seed=layer)
        tensors[bias] = 0.1 * normal(widths[layer + 1], seed=10 + layer)
        product = f"h{layer}" if layer < 5 else "y"
        nodes.append(node("Gemm", [value, weight, bias], [product]))
        if layer < 5:
            value = f"t{layer}"
            nodes.append(node("Tanh", [product], [value]))
    return build(nodes, [("x", ["N", 6])], ["y"], tensors)


def turned() -> onnx.ModelProto:
    """Features lead in its middle: two tensors cross there, one with samples first."""
    return build(
        [
            node("Gemm", ["x", "w0"], ["h0"]),
            node("Tanh", ["h0"], ["t0"]),
            node("Gemm", ["t0", "w1"], ["h1"]),
            node("Tanh", ["h1"], ["t1"]),
            node("Transpose", ["t1"], ["side"], perm=[1, 0]),
            node("MatMul", ["w2", "side"], ["h2"]),
            node("Tanh", ["h2"], ["t2"]),
            node("MatMul", ["w3", "t2"], ["h3"]),
            node("Transpose", ["h3"], ["back"], perm=[1, 0]),
            node("Add", ["back", "t1"], ["sum"]),
            node("Gemm", ["sum", "w4"], ["y"]),
        ],
        [("x", ["N", 6])],
        ["y"],
        {
            "w0": scaled(6, 8),
            "w1": scaled(8, 8, seed=1),
            "w2": scaled(8, 8, seed=2),
            "w3": scaled(8, 8, seed=3),
            "w4": scaled(8, CLASSES, seed=4),
        },
    )


MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "chain": chain,
    "residual": residual,
    "mobile": mobile,
    "encoder": encoder,
    "stream": stream,
    "late_input": late_input,
    "tokens": tokens,
    "early_output": early_output,
    "deep": deep,
    "turned": turned,
}
OUTPUT = {"early_output": "y"}


@cache
def program(name: str, batch: int = BATCH) -> Program:
    return normalise(MODELS[name](), batch=batch)


def samples(name: str, seed: int = 0, batch: int = BATCH) -> dict[str, np.ndarray]:
    """Random data inputs of one microbatch, and its ``labels``."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, np.ndarray] = {"labels": rng.integers(0, CLASSES, batch)}
    for spec in program(name, batch).inputs:
        if spec.is_float:
            feeds[spec.name] = rng.standard_normal(spec.shape).astype(spec.dtype)
        else:
            feeds[spec.name] = rng.integers(0, 11, spec.shape)
    return feeds
