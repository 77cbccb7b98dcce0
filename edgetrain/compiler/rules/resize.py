"""Resize, which is linear and works on each axis by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from edgetrain.compiler import reference
from edgetrain.compiler.build import Array, GraphBuilder, Node
from edgetrain.compiler.program import IR_VERSION, OPSET
from edgetrain.compiler.rules.base import Cotangents, Tangents
from edgetrain.compiler.rules.shaping import scaled, swap_last
from edgetrain.compiler.values import value_info
from edgetrain.errors import UnsupportedOpError
from edgetrain.tensors import TensorSpec

# About all axes at once, or of no effect on what is linear.
_NOT_OF_AN_AXIS = ("axes", "keep_aspect_ratio_policy", "extrapolation_value")


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What happens along one axis.

    Attributes:
        axis: of the value that is resized.
        old, new: its extents before and after.
        scale: the factor; new / old but for rounding.
        part: start and end of what is resized, of 0 to 1; None for all.
    """

    axis: int
    old: int
    new: int
    scale: float
    part: tuple[float, float] | None


def resize_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Each resized axis is a product with a constant matrix; dx takes its transpose.

    Images enlarged by repeating pixels are the common case and take an average pool.

    Raises:
        GraphError: scales, sizes or the region to crop are computed at run time.
        UnsupportedOpError: a size that keeps the aspect ratio is rounded up.
    """
    x = node.inputs[0]
    matrices = {stretch.axis: _matrix(node, stretch) for stretch in _stretches(g, node)}
    rank = g.rank(x)
    if rank > 2 and min(matrices, default=2) >= 2 and all(map(_repeats, matrices.values())):
        old, new = g.shape(x)[2:], g.shape(node.output)[2:]
        factors = [n // o for o, n in zip(old, new, strict=True)]
        mean = g("AveragePool", dy, kernel_shape=factors, strides=factors)
        return (scaled(g, mean, math.prod(factors), x),)
    for axis, matrix in matrices.items():
        dy = _along(g, dy, axis, rank, g.constant(matrix.T, g.dtype(x)))
    return (dy,)


def resize_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    """The op itself, with zeros outside of what it resizes."""
    attributes = {k: v for k, v in node.attributes.items() if k != "extrapolation_value"}
    return tangents[0] and g("Resize", tangents[0], *node.inputs[1:], **attributes)


def _stretches(g: GraphBuilder, node: Node) -> Iterator[_Stretch]:
    """The axes that are resized."""
    old, new = g.shape(node.inputs[0]), g.shape(node.output)
    axes = [int(a) % len(old) for a in node.get("axes", range(len(old)))]
    scales = _scales(g, node, axes)
    mode = node.get("coordinate_transformation_mode", "half_pixel")
    parts: list[float] = []
    if mode == "tf_crop_and_resize":
        parts = g.value(node.inputs[1]).tolist()
    for i, axis in enumerate(axes):
        part = (parts[i], parts[len(axes) + i]) if parts else None
        if scales[i] != 1 or part not in (None, (0, 1)):
            yield _Stretch(axis, old[axis], new[axis], scales[i], part)


def _scales(g: GraphBuilder, node: Node, axes: list[int]) -> list[float]:
    if node.input(2):
        return [float(s) for s in g.value(node.inputs[2])]
    old = g.shape(node.inputs[0])
    sizes = g.value(node.inputs[3]).tolist()
    wanted = [size / old[axis] for size, axis in zip(sizes, axes, strict=True)]
    match node.get("keep_aspect_ratio_policy", "stretch"):
        case "not_larger":
            scale = min(wanted)
        case "not_smaller":
            scale = max(wanted)
        case _:
            return wanted
    new = g.shape(node.output)
    if any(new[axis] != math.floor(scale * old[axis]) for axis in axes):
        raise UnsupportedOpError(
            node.op_type, node.name,
            "it keeps the aspect ratio and rounds a size up; give it the final sizes",
        )  # fmt: skip
    return [scale] * len(wanted)


def _matrix(node: Node, stretch: _Stretch) -> Array:
    """What resizing does along one axis, as [old, new]: its effect on unit vectors.

    It is measured on ONNX Runtime, as engines and the standard's own reference differ
    where a factor does not divide the extent.
    """
    # Given a size the kernel takes new / old for the factor, given a factor it rounds.
    exact = stretch.scale == stretch.new / stretch.old
    inputs = ["x", "roi" if stretch.part else "", "" if exact else "scales"]
    start, end = stretch.part or (0.0, 1.0)
    feeds: dict[str, Array] = {
        "x": np.eye(stretch.old, dtype=np.float32),
        "roi": np.array([0, start, 1, end], np.float32),
        "scales": np.array([1, stretch.scale], np.float32),
        "sizes": np.array([stretch.old, stretch.new], np.int64),
    }
    attributes = {k: v for k, v in node.attributes.items() if k not in _NOT_OF_AN_AXIS}
    proto = helper.make_node(
        "Resize", [*inputs, "sizes"] if exact else inputs, ["y"], **attributes
    )
    graph = helper.make_graph(
        [proto],
        "axis",
        [
            value_info(TensorSpec(name, feeds[name].dtype.name, feeds[name].shape))
            for name in filter(None, proto.input)
        ],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    return reference.run(model, feeds)["y"]


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
