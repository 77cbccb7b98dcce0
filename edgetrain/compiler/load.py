"""Reading an ONNX file, and refusing what is not one."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import DecodeError
from onnx import external_data_helper, helper

from edgetrain.errors import GraphError

# Types of which several elements share a byte; their data's length is not checked.
_SUB_BYTE: Final = frozenset(
    value
    for name, value in onnx.TensorProto.DataType.items()
    if name.endswith(("INT4", "INT2", "4E2M1"))
)


def load(path: Path) -> onnx.ModelProto:
    """Read a model with all its tensors, external data included.

    Raises:
        GraphError: the file is missing, unreadable, damaged, not ONNX, or holds no graph.
    """
    model = load_skeleton(path)
    try:
        external_data_helper.load_external_data_for_model(model, str(path.parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise GraphError(
            f"the external data of {path} cannot be read: {_first_line(error)};"
            " keep the data files beside the .onnx file, as they were exported"
        ) from error
    for tensor in model.graph.initializer:
        _check_tensor(tensor, path)
    _check_names(model.graph, path)
    return model


def load_skeleton(path: Path) -> onnx.ModelProto:
    """Read a model without its external data.

    Raises:
        GraphError: the file is missing, unreadable, damaged, not ONNX, or holds no graph.
    """
    model = _parse(path)
    if not (model.ir_version and model.graph.node and model.opset_import):
        raise GraphError(
            f"{path} holds no whole ONNX graph (it is cut short, empty, or of another"
            " format); give the .onnx file that your exporter wrote"
        )
    return model


def model_sha256(path: Path) -> str:
    """Hash of the model file, in hexadecimal; external data is not part of it.

    Raises:
        GraphError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _parse(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise _unreadable(path, error) from error
    except DecodeError as error:
        raise GraphError(
            f"{path} is damaged or is not an ONNX file: it does not parse;"
            " compare its size with the original, and export or copy it again"
        ) from error


def _unreadable(path: Path, error: OSError) -> GraphError:
    reason = error.strerror or str(error)
    return GraphError(f"the model {path} cannot be read: {reason}; check the path")


def _check_tensor(tensor: onnx.TensorProto, path: Path) -> None:
    """Its bytes must be as many as its type and shape announce."""
    if not tensor.HasField("raw_data"):
        return
    try:
        itemsize = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, TypeError) as error:
        raise GraphError(
            f"initializer {tensor.name!r} of {path} has the unknown type"
            f" {tensor.data_type}; the file is damaged or newer than this onnx package"
        ) from error
    if tensor.data_type in _SUB_BYTE:
        return
    expected = math.prod(tensor.dims) * itemsize
    if len(tensor.raw_data) != expected:
        raise GraphError(
            f"initializer {tensor.name!r} of {path} has {len(tensor.raw_data)} B, its type"
            f" and shape need {expected} B: the file is damaged; export or copy it again"
        )


def _check_names(graph: onnx.GraphProto, path: Path) -> None:
    defined = {"", *(i.name for i in graph.input), *(t.name for t in graph.initializer)}
    defined.update(t.values.name for t in graph.sparse_initializer)
    defined.update(name for node in graph.node for name in node.output)
    wanted = {out.name: "the graph's outputs" for out in graph.output}
    for node in graph.node:
        wanted.update(dict.fromkeys(node.input, f"node {node.name or node.op_type!r}"))
    for name, reader in wanted.items():
        if name not in defined:
            raise GraphError(
                f"{path}: {reader} needs the value {name!r}, which nothing produces;"
                " the file is damaged or was edited; export it again"
            )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
