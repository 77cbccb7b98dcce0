"""Writing trained weights into a model file whose tensors lie in files beside it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, external_data_helper, helper

from edgetrain.compiler.export import Weights, changed, fill, write
from edgetrain.compiler.load import load_skeleton
from edgetrain.compiler.program import Program
from edgetrain.compiler.tidy import graphs
from edgetrain.errors import GraphError

Array = npt.NDArray[Any]


def export_file(source: Path, target: Path, program: Program, weights: Weights) -> None:
    """Write the user's file with new weights, its data files beside it as they were.

    Tensors stay where the file has them, inside it or in a data file: data files are
    copied, and the weights in them overwritten one by one, so that no more than one tensor
    is in memory beside the weights. A model of any size can be written so, also where one
    protobuf could not hold it.

    Args:
        source: the file that was normalised; its data files are beside it.
        target: the file to write. Where the source has data files, it must be in another
            folder, as they keep their names.
        program: what `normalise` made of the source.
        weights: new value of each weight; weights left out keep theirs.

    Raises:
        GraphError: a weight does not fit, a file cannot be read or written, a data file
            lies outside the source's folder, or the target's folder is the source's.
    """
    model = load_skeleton(source)
    names = {_location(tensor, source) for tensor in _external(model)}
    if names and source.parent.resolve() == target.parent.resolve():
        raise GraphError(
            f"{target} would overwrite the data files of {source}, which keep their names:"
            " write the trained model into another folder"
        )

    def put(tensor: TensorProto, value: Array) -> None:
        if external_data_helper.uses_external_data(tensor):
            _overwrite(target.parent, tensor, value)
        else:
            fill(tensor, value)

    try:
        for name in sorted(names):
            copy = target.parent / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.parent / name, copy)
        write(model, program, weights, put)
        target.write_bytes(model.SerializeToString())
    except OSError as error:
        raise GraphError(
            f"the trained model cannot be written: {error.filename}: {error.strerror};"
            " free some space, or give a folder that can be written"
        ) from error


def has_data_files(source: Path) -> bool:
    """Whether some of the file's tensors lie in files beside it.

    Raises:
        GraphError: it cannot be read.
    """
    return any(True for _ in _external(load_skeleton(source)))


def _external(model: onnx.ModelProto) -> Iterator[TensorProto]:
    for graph in graphs(model.graph):
        attributes = (a for node in graph.node for a in node.attribute)
        for tensor in (*graph.initializer, *(a.t for a in attributes)):
            if external_data_helper.uses_external_data(tensor):
                yield tensor


def _location(tensor: TensorProto, source: Path) -> str:
    """The data file's path, relative to the model's folder and within it."""
    location = external_data_helper.ExternalDataInfo(tensor).location
    path = PurePosixPath(location)
    if not location or path.is_absolute() or ".." in path.parts:
        raise GraphError(
            f"tensor {tensor.name!r} of {source} lies in {location!r}, which is not inside"
            " the model's folder; export the model again with its data beside it"
        )
    return location


def _overwrite(folder: Path, tensor: TensorProto, value: Array) -> None:
    info = external_data_helper.ExternalDataInfo(tensor)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type).newbyteorder("<")
    held = np.memmap(
        folder / info.location, dtype, "r+", info.offset or 0, tuple(tensor.dims)
    )
    held[...] = changed(held, value)
    held.flush()
