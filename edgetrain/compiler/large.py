"""Setting large weights apart first, so that no copy of a model ever holds them.

Rewriting copies models and tools serialize them, which protobuf ends at 2 GB. Without its
large weights a model of any size is small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgetrain.compiler import sites, weights

Array = npt.NDArray[Any]

LARGE_BYTES: Final = 1 << 20


def set_apart(
    model: onnx.ModelProto,
    held: Mapping[str, sites.Site],
    least_bytes: int = LARGE_BYTES,
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """What is needed of a model to normalise it, and its large weights.

    Args:
        model: as loaded; it is not altered.
        held: the tensors of the file, from `sites.find`.
        least_bytes: what counts as large.

    Returns:
        A copy in which nothing gives the values of the large weights, and these values:
        bfloat16 as float32, others in the file's type. What is read inside a function, or
        repeated by an Identity, stays in the model: its use is not known yet.
    """
    graph = model.graph
    readers = {} if model.functions else weights.uses(graph)
    repeated = {n.input[0] for n in graph.node if n.op_type == "Identity"}
    apart: dict[str, Array] = {}
    for tensor in graph.initializer:
        site = held.get(tensor.name)
        if site is None or tensor.name in repeated or _nbytes(tensor) < least_bytes:
            continue
        value = numpy_helper.to_array(tensor)
        wide = value.astype(np.float32, copy=False)
        if weights.is_weight(wide, readers.get(tensor.name, ())):
            brain = tensor.data_type == TensorProto.BFLOAT16
            apart[tensor.name] = wide if brain else value
    return _without(model, apart), apart


def declare(graph: onnx.GraphProto, apart: Mapping[str, Array]) -> None:
    """Make inputs of the weights that were set apart, in place."""
    for name, value in apart.items():
        data_type = helper.np_dtype_to_tensor_dtype(value.dtype)
        graph.input.append(helper.make_tensor_value_info(name, data_type, value.shape))


def _nbytes(tensor: TensorProto) -> int:
    elements: int = math.prod(tensor.dims)
    return elements * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def _without(model: onnx.ModelProto, apart: Mapping[str, Array]) -> onnx.ModelProto:
    skeleton = onnx.ModelProto(
        ir_version=model.ir_version,
        opset_import=model.opset_import,
        functions=model.functions,
    )
    graph, whole = skeleton.graph, model.graph
    graph.name = whole.name
    graph.node.extend(whole.node)
    graph.input.extend(info for info in whole.input if info.name not in apart)
    graph.output.extend(whole.output)
    graph.sparse_initializer.extend(whole.sparse_initializer)
    graph.initializer.extend(t for t in whole.initializer if t.name not in apart)
    return skeleton
