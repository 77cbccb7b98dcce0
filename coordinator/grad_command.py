"""`edgetrain grad`: a model and its derivative, in one file for any ONNX runtime."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from coordinator.figures import bytes_text
from coordinator.tables import Column, print_table
from edgetrain.compiler.grad import grad
from edgetrain.compiler.values import tensor_spec
from edgetrain.errors import ConfigError, RunError
from edgetrain.losses import assigned
from edgetrain.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Request:
    """What to make of a model; see `edgetrain.grad`.

    Attributes:
        loss_options: each as ``key=value``.
        wrt: patterns; empty: all weights.
        shapes: of inputs that the file leaves open, each as ``name=3,224,224``, without
            the batch.
        weights: a file to write the values of the weights to; None: none.
    """

    mode: str = "vjp"
    loss: str | None = None
    loss_options: Sequence[str] = ()
    output: str = ""
    wrt: Sequence[str] = ()
    batch: int = 1
    shapes: Sequence[str] = ()
    weights: Path | None = None


class Written(msgspec.Struct, frozen=True):
    """The file that was made.

    Attributes:
        weights: those of its inputs that have a default value.
        size_bytes: of the file.
    """

    path: str
    inputs: tuple[TensorSpec, ...]
    weights: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    size_bytes: int


def write(model: Path, out: Path, request: Request) -> Written:
    """Differentiate a file into another one.

    Args:
        model: the ONNX file.
        out: is overwritten, unless it is `model`.
        request: what to make of it.

    Raises:
        InputError: model or request do not do.
        RunError: a file cannot be written.
    """
    if out.exists() and model.exists() and out.samefile(model):
        raise ConfigError(f"{out} is the model itself: give another file with -o")
    wrt = request.wrt[0] if len(request.wrt) == 1 else tuple(request.wrt) or "all"
    result = grad(
        model,
        mode=request.mode,
        loss=request.loss,
        loss_options=assigned(request.loss_options),
        output=request.output,
        wrt=wrt,
        batch=request.batch,
        shapes=dict(map(_shape, request.shapes)),
    )
    data = result.SerializeToString()
    _save(out, data)
    written = _described(out, result, len(data))
    if request.weights is not None:
        names = {spec.name for spec in written.weights}
        _save(request.weights, _archive(result, names))
    return written


def show(written: Written, *, as_json: bool) -> None:
    """Print the file's inputs and outputs, as one object or as a table."""
    if as_json:
        print(msgspec.json.encode(written).decode())
        return
    kinds = (
        ("input", written.inputs),
        ("weight", written.weights),
        ("output", written.outputs),
    )
    rows = [
        (kind, spec.name, spec.dtype, str(list(spec.shape)))
        for kind, specs in kinds
        for spec in specs
    ]
    print_table((Column("is"), Column("name"), Column("type"), Column("shape")), rows)
    print(f"wrote {written.path}, {bytes_text(written.size_bytes)}")


def _shape(assignment: str) -> tuple[str, tuple[int, ...]]:
    name, _, text = assignment.rpartition("=")
    extents = text.split(",") if text else []
    if not name or not all(extent.strip().isdecimal() for extent in extents):
        raise ConfigError(
            f"--shape {assignment!r} is not of the form input=3,224,224, the extents"
            " without the batch"
        )
    return name, tuple(map(int, extents))


def _save(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(
            f"{path} cannot be written ({reason}): check the path and the free space"
        ) from error


def _archive(model: onnx.ModelProto, names: Collection[str]) -> bytes:
    """Initializers as an .npz; by hand, as `numpy.savez` reserves some names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for tensor in model.graph.initializer:
            if tensor.name in names:
                with archive.open(f"{tensor.name}.npy", "w", force_zip64=True) as entry:
                    array = numpy_helper.to_array(tensor)
                    np.lib.format.write_array(entry, array, allow_pickle=False)
    return buffer.getvalue()


def _described(path: Path, model: onnx.ModelProto, size_bytes: int) -> Written:
    held = {tensor.name for tensor in model.graph.initializer}
    fed = [tensor_spec(info) for info in model.graph.input]
    return Written(
        path=str(path),
        inputs=tuple(spec for spec in fed if spec.name not in held),
        weights=tuple(spec for spec in fed if spec.name in held),
        outputs=tuple(tensor_spec(info) for info in model.graph.output),
        size_bytes=size_bytes,
    )
