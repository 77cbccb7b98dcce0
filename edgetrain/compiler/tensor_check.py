"""Tensors that a file holds: each of a known type, and as long as its shape says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import onnx
from onnx import TensorProto, helper

from edgetrain.compiler import limits
from edgetrain.compiler.tidy import graphs
from edgetrain.errors import GraphError

# How many elements share a byte, where several do.
_PACKED: Final[Mapping[int, int]] = {
    value: 4 if name.endswith("INT2") else 2
    for name, value in TensorProto.DataType.items()
    if name.endswith(("INT4", "INT2", "4E2M1"))
}
_COMPLEX: Final = frozenset({TensorProto.COMPLEX64, TensorProto.COMPLEX128})


def check(model: onnx.ModelProto, place: str) -> None:
    """Check every tensor: of the graph, of those within, of attributes, of functions.

    Raises:
        GraphError: a tensor is of a type that is unknown or not numeric, its shape is none,
            its data is elsewhere, or its elements are not as many as its shape says.
    """
    for graph in graphs(model.graph):
        for tensor in graph.initializer:
            _check(tensor, f"initializer {tensor.name!r} of {place}")
        _check_all(_of_attributes(graph.node), place)
    for function in model.functions:
        _check_all(_of_attributes(function.node), place)


def _check_all(tensors: Iterable[tuple[onnx.NodeProto, TensorProto]], place: str) -> None:
    for node, tensor in tensors:
        name = node.name or ", ".join(node.output)
        _check(tensor, f"the tensor in {node.op_type} node {name!r} of {place}")


def _of_attributes(
    nodes: Iterable[onnx.NodeProto],
) -> Iterator[tuple[onnx.NodeProto, TensorProto]]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield node, attribute.t
            for tensor in attribute.tensors:
                yield node, tensor


def _check(tensor: TensorProto, label: str) -> None:
    if tensor.data_type == TensorProto.STRING:
        raise GraphError(f"{label} holds strings; export it without its text processing")
    try:
        itemsize = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, TypeError) as error:
        raise GraphError(
            f"{label} has the unknown type {tensor.data_type}; the file is damaged or newer"
            " than this onnx package"
        ) from error
    if tensor.data_location == TensorProto.EXTERNAL:
        raise GraphError(
            f"{label} has its data in another file, which was not read; read the model with"
            " onnx.load, or give its path"
        )
    if not limits.is_shape(tensor.dims, itemsize):
        raise GraphError(
            f"{label} has the shape {limits.describe(tensor.dims)}, which no tensor has:"
            " the file is damaged; export or copy it again"
        )
    _check_length(tensor, itemsize, label)


def _check_length(tensor: TensorProto, itemsize: int, label: str) -> None:
    per_byte = _PACKED.get(tensor.data_type, 1)
    expected = -(-math.prod(tensor.dims) // per_byte)  # rounded up
    if tensor.HasField("raw_data"):
        unit, found = "B", len(tensor.raw_data)
        expected *= itemsize
    else:
        field = helper.tensor_dtype_to_field(tensor.data_type)
        unit, found = f"items of {field}", len(getattr(tensor, field))
        expected *= 2 if tensor.data_type in _COMPLEX else 1
    if found != expected:
        raise GraphError(
            f"{label} has {found} {unit}, its type and shape need {expected} {unit}: the"
            " file is damaged; export or copy it again"
        )
