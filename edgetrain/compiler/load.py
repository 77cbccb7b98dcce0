"""Reading an ONNX file, and refusing what is not one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import external_data_helper

from edgetrain.compiler.admission import admit
from edgetrain.errors import GraphError


def load(path: Path) -> onnx.ModelProto:
    """Read a model with all its tensors, external data included.

    Raises:
        GraphError: the file is missing, unreadable, damaged, not ONNX, or malformed.
    """
    model = load_skeleton(path)
    try:
        external_data_helper.load_external_data_for_model(model, str(path.parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise GraphError(
            f"the external data of {path} cannot be read: {_first_line(error)};"
            " keep the data files beside the .onnx file, as they were exported"
        ) from error
    admit(model, str(path))
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


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
