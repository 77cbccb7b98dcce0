"""Types and static shapes of a model's values, between ONNX's form and ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from edgetrain.errors import GraphError
from edgetrain.tensors import TensorSpec

Array = npt.NDArray[Any]


def value_info(spec: TensorSpec) -> onnx.ValueInfoProto:
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
    return helper.make_tensor_value_info(spec.name, dtype, list(spec.shape))


def tensor_spec(info: onnx.ValueInfoProto) -> TensorSpec:
    """Read a value's type and static shape.

    Raises:
        GraphError: it is not a tensor, or an extent is not a number.
    """
    tensor = info.type.tensor_type
    if not info.type.HasField("tensor_type") or not tensor.HasField("shape"):
        raise GraphError(f"value {info.name!r} has no known tensor shape")
    dims = tensor.shape.dim
    if not all(d.HasField("dim_value") for d in dims):
        raise GraphError(f"value {info.name!r} has an extent that is not a number")
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)).name
    return TensorSpec(info.name, dtype, tuple(int(d.dim_value) for d in dims))


def value_table(model: onnx.ModelProto) -> dict[str, TensorSpec]:
    """Type and shape of every value of a normalised model."""
    graph = model.graph
    infos = (*graph.input, *graph.value_info, *graph.output)
    table = {info.name: tensor_spec(info) for info in infos}
    for tensor in graph.initializer:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).name
        table[tensor.name] = TensorSpec(tensor.name, dtype, tuple(tensor.dims))
    return table


def constants(model: onnx.ModelProto) -> dict[str, Array]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
