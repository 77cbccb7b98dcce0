"""Small ONNX models, in the forms that exporters write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Value = tuple[str, Sequence[int | str | None]]


def build(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[str],
    tensors: Mapping[str, np.ndarray] | None = None,
    opset: int = 20,
) -> onnx.ModelProto:
    """A float model; outputs are declared without a shape."""
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in (tensors or {}).items()],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8
    )


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def mlp(dtype: str = "float32") -> onnx.ModelProto:
    """x [N, 4] -> Gemm, Relu, MatMul, Add -> y [N, 1]."""
    node = helper.make_node
    model = build(
        [
            node("Gemm", ["x", "w1", "b1"], ["h"], "first", transB=1),
            node("Relu", ["h"], ["r"], "relu"),
            node("MatMul", ["r", "w2"], ["m"], "second"),
            node("Add", ["m", "b2"], ["y"], "bias"),
        ],
        [("x", ["N", 4])],
        ["y"],
        {
            "w1": normal(8, 4, dtype=dtype),
            "b1": normal(8, seed=1, dtype=dtype),
            "w2": normal(8, 1, seed=2, dtype=dtype),
            "b2": normal(1, seed=3, dtype=dtype),
        },
    )
    data_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.elem_type = data_type
    return model


def convnet(opset: int = 11) -> onnx.ModelProto:
    """x [N, 3, 8, 8] -> Conv (weights in Constant nodes), BN in training form, Dropout,
    a Flatten written as Shape arithmetic, Gemm with a ConstantOfShape bias -> y [N, 5]."""
    node = helper.make_node
    half = normal(6, seed=7)

    def constant(name: str, value: np.ndarray) -> onnx.NodeProto:
        return node("Constant", [], [name], value=numpy_helper.from_array(value))

    unsqueeze = {"axes": [0]} if opset < 13 else {}
    axes = [] if opset < 13 else ["axes"]
    return build(
        [
            constant("conv.w", normal(6, 3, 3, 3)),
            constant("conv.b", normal(6, seed=1)),
            node("Conv", ["x", "conv.w", "conv.b"], ["c"], "conv", pads=[1, 1, 1, 1]),
            node(
                "BatchNormalization",
                ["c", "bn.scale", "bn.bias", "bn.mean", "bn.var"],
                ["n", "bn.mean_out", "bn.var_out"],
                "bn",
                momentum=0.9,
                **({"training_mode": 1} if opset >= 14 else {}),
            ),
            node("Dropout", ["n"], ["d"], "drop"),
            node("Shape", ["d"], ["shape"], "shape"),
            node("Gather", ["shape", "zero"], ["batch"], "batch", axis=0),
            node("Unsqueeze", ["batch", *axes], ["batch1"], "lift", **unsqueeze),
            node("Concat", ["batch1", "minus"], ["target"], "target", axis=0),
            node("Reshape", ["d", "target"], ["flat"], "flatten"),
            node("ConstantOfShape", ["five"], ["fc.b"], "fill"),
            node("Gemm", ["flat", "fc.w", "fc.b"], ["logits"], "fc"),
            node("Identity", ["logits"], ["y"], "rename"),
        ],
        [("x", ["N", 3, 8, 8])],
        ["y"],
        {
            "bn.scale": 1 + 0.1 * half,
            "bn.bias": half,
            "bn.mean": 0.1 * half,
            "bn.var": 1 + half**2,
            "zero": np.asarray(0, np.int64),
            "axes": np.asarray([0], np.int64),
            "minus": np.asarray([-1], np.int64),
            "five": np.asarray([5], np.int64),
            "fc.w": normal(384, 5, seed=2),
        },
        opset,
    )


def conv_chain(
    layers: int = 12, channels: int = 8, size: int = 16, *, norm: bool = False
) -> onnx.ModelProto:
    """x [N, 3, size, size] -> Conv, Relu `layers` times, mean, MatMul -> y [N, 5].

    With `norm`, a BatchNormalization after each Conv.
    """
    node = helper.make_node
    nodes, weights, x = [], {}, "x"
    for i in range(layers):
        fan_in = channels if i else 3
        kernel = normal(channels, fan_in, 3, 3, seed=i) / np.float32(np.sqrt(9 * fan_in))
        nodes.append(node("Conv", [x, f"w{i}"], [f"c{i}"], pads=[1, 1, 1, 1]))
        weights[f"w{i}"] = kernel
        x = f"c{i}"
        if norm:
            parts = {f"{part}{i}": np.ones(channels, np.float32) for part in "sbmv"}
            nodes.append(node("BatchNormalization", [x, *parts], [f"n{i}"]))
            weights |= parts
            x = f"n{i}"
        nodes.append(node("Relu", [x], [f"r{i}"]))
        x = f"r{i}"
    nodes.append(node("GlobalAveragePool", [x], ["mean"]))
    nodes.append(node("Flatten", ["mean"], ["flat"]))
    nodes.append(node("MatMul", ["flat", "w"], ["y"]))
    weights["w"] = normal(channels, 5, seed=layers)
    return build(nodes, [("x", ["N", 3, size, size])], ["y"], weights)


def aliased() -> onnx.ModelProto:
    """Two LayerNormalization whose equal parameters were merged through Identity nodes."""
    node = helper.make_node
    return build(
        [
            node("Identity", ["norm1.scale"], ["norm2.scale"], "alias_scale"),
            node("Identity", ["norm1.bias"], ["norm2.bias"], "alias_bias"),
            node("LayerNormalization", ["x", "norm1.scale", "norm1.bias"], ["a"], "norm1"),
            node("MatMul", ["a", "w"], ["b"], "mix"),
            node("LayerNormalization", ["b", "norm2.scale", "norm2.bias"], ["y"], "norm2"),
        ],
        [("x", ["N", 6])],
        ["y"],
        {
            "norm1.scale": np.ones(6, np.float32),
            "norm1.bias": np.zeros(6, np.float32),
            "w": normal(6, 6),
        },
        17,
    )


def conditional(condition_from_data: bool) -> onnx.ModelProto:
    """x -> If(...) then x + w else x - w."""

    def branch(op: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, None)
        return helper.make_graph(
            [helper.make_node(op, ["x", "w"], [f"{op}_out"], op)], op, [], [out]
        )

    node = helper.make_node
    first = (
        [
            node("ReduceSum", ["x"], ["sum"], keepdims=0),
            node("Greater", ["sum", "nought"], ["condition"]),
        ]
        if condition_from_data
        else [
            node("Shape", ["x"], ["shape"]),
            node("Size", ["shape"], ["rank"]),
            node("Equal", ["rank", "two"], ["condition"]),
        ]
    )
    return build(
        [
            *first,
            node(
                "If",
                ["condition"],
                ["y"],
                "choose",
                then_branch=branch("Add"),
                else_branch=branch("Sub"),
            ),
        ],
        [("x", ["N", 3])],
        ["y"],
        {
            "w": normal(3),
            "nought": np.asarray(0, np.float32),
            "two": np.asarray(2, np.int64),
        },
        17,
    )
