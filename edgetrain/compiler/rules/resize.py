"""Resize, which is linear and works on each axis by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from edgetrain.compiler.build import Array, GraphBuilder, Node
from edgetrain.compiler.program import IR_VERSION, OPSET
from edgetrain.compiler.rules.base import Cotangents
from edgetrain.compiler.rules.shaping import scaled, swap_last
from edgetrain.errors import UnsupportedOpError


def resize_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Each resized axis is a product with a constant matrix; dx takes its transpose.

    Images enlarged by repeating pixels are the common case and take an average pool.

    Raises:
        UnsupportedOpError: it crops, or keeps an aspect ratio.
    """
    if node.get("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        raise UnsupportedOpError(node.op_type, node.name, "it crops; use Slice for that")
    if node.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise UnsupportedOpError(
            node.op_type, node.name, "it keeps the aspect ratio; give it the final sizes"
        )
    x = node.inputs[0]
    matrices = {axis: _matrix(g, node, axis, scale) for axis, scale in _scales(g, node)}
    rank = g.rank(x)
    if rank > 2 and min(matrices, default=2) >= 2 and all(map(_repeats, matrices.values())):
        old, new = g.shape(x)[2:], g.shape(node.output)[2:]
        factors = [n // o for o, n in zip(old, new, strict=True)]
        mean = g("AveragePool", dy, kernel_shape=factors, strides=factors)
        return (scaled(g, mean, math.prod(factors), x),)
    for axis, matrix in matrices.items():
        dy = _along(g, dy, axis, rank, g.constant(matrix.T, g.dtype(x)))
    return (dy,)


def _scales(g: GraphBuilder, node: Node) -> Iterator[tuple[int, float]]:
    """The axes that are resized, with their factors."""
    old, new = g.shape(node.inputs[0]), g.shape(node.output)
    axes = [int(a) % len(old) for a in node.get("axes", range(len(old)))]
    scales = g.value(node.input(2)).tolist() if node.input(2) else []
    for i, axis in enumerate(axes):
        scale = scales[i] if scales else new[axis] / old[axis]
        if scale != 1:
            yield axis, scale


def _matrix(g: GraphBuilder, node: Node, axis: int, scale: float) -> Array:
    """What resizing does along one axis, as [old, new]: its effect on unit vectors."""
    old = g.shape(node.inputs[0])[axis]
    skipped = ("axes", "keep_aspect_ratio_policy")
    attributes = {k: v for k, v in node.attributes.items() if k not in skipped}
    proto = helper.make_node("Resize", ["x", "", "scales"], ["y"], **attributes)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [proto],
        "axis",
        [
            info("x", onnx.TensorProto.FLOAT, [old, old]),
            info("scales", onnx.TensorProto.FLOAT, [2]),
        ],
        [info("y", onnx.TensorProto.FLOAT, None)],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    feeds = {
        "x": np.eye(old, dtype=np.float32),
        "scales": np.array([1, scale], np.float32),
    }
    (matrix,) = ReferenceEvaluator(model).run(None, feeds)
    return np.asarray(matrix)


def _repeats(matrix: Array) -> bool:
    """The matrix repeats every element a whole number of times."""
    old, new = matrix.shape
    return new % old == 0 and np.array_equal(
        matrix, np.repeat(np.eye(old), new // old, axis=1)
    )


def _along(g: GraphBuilder, value: str, axis: int, rank: int, matrix: str) -> str:
    """Multiply by a matrix along one axis."""
    if axis == rank - 1:
        return g("MatMul", value, matrix)
    if axis == rank - 2:
        return g("MatMul", swap_last(g, matrix, 2), value)
    perm = [*range(rank)]
    perm[axis], perm[-1] = perm[-1], perm[axis]
    moved = g("MatMul", g("Transpose", value, perm=perm), matrix)
    return g("Transpose", moved, perm=perm)
