"""Damage to the tensors and to the declared values of a model.

Each edit takes a model, changes it in place, and draws what it does from the generator.
"""

from __future__ import annotations

import numpy as np
import onnx
from hostile_nodes import (
    EXTENTS,
    FLOATS,
    SHAPES,
    Rng,
    info_of,
    name_of,
    node_of,
    pick,
    tensor_of,
)
from onnx import TensorProto, helper


def tensor_shape(model: onnx.ModelProto, rng: Rng) -> None:
    tensor = tensor_of(model, rng)
    match int(rng.integers(3)):
        case 0 if tensor.dims:
            tensor.dims[int(rng.integers(len(tensor.dims)))] = pick(rng, EXTENTS)
        case 1:
            tensor.dims.append(pick(rng, EXTENTS))
        case _:
            tensor.dims[:] = [pick(rng, EXTENTS) for _ in range(rng.integers(0, 5))]
            if rng.random() < 0.5:
                for name in ("raw_data", "float_data", "int64_data", "int32_data"):
                    tensor.ClearField(name)


def tensor_type(model: onnx.ModelProto, rng: Rng) -> None:
    tensor_of(model, rng).data_type = int(rng.integers(0, 30))


def tensor_data(model: onnx.ModelProto, rng: Rng) -> None:
    """Values that may be shapes, axes and scales: absurd ones."""
    tensor = tensor_of(model, rng)
    count = max(0, min(64, int(np.prod(np.clip(np.asarray(tensor.dims), 0, 64)))))
    match int(rng.integers(6)):
        case 0:
            tensor.raw_data = rng.bytes(int(rng.integers(0, 64)))
        case 1:
            tensor.string_data.extend([b"text"] * count)
            tensor.data_type = TensorProto.STRING
            tensor.ClearField("raw_data")
        case 2:
            tensor.ClearField("raw_data")
            tensor.float_data[:] = [pick(rng, FLOATS) for _ in range(count)]
        case _ if tensor.data_type == TensorProto.INT64:
            values = [pick(rng, SHAPES) for _ in range(count)]
            tensor.raw_data = np.asarray(values, "<i8").tobytes()
        case _:
            values = [pick(rng, FLOATS) for _ in range(len(tensor.raw_data) // 4)]
            tensor.raw_data = np.asarray(values, "<f4").tobytes()


def external(model: onnx.ModelProto, rng: Rng) -> None:
    """Data beside the file: missing, outside, a device, or with absurd bounds."""
    tensor = tensor_of(model, rng)
    tensor.data_location = TensorProto.EXTERNAL
    if rng.random() < 0.7:
        tensor.ClearField("raw_data")
    places = ("none.bin", "../../../etc/passwd", "/etc/passwd", "/dev/zero", ".", "", "\0a")
    tensor.external_data.add(key="location", value=pick(rng, (*places, "model.onnx")))
    for key in ("offset", "length"):
        if rng.random() < 0.5:
            value = pick(rng, ("-1", "0", "4", "words", str(2**62), "1e9", ""))
            tensor.external_data.add(key=key, value=value)


def value_shape(model: onnx.ModelProto, rng: Rng) -> None:
    tensor = info_of(model, rng).type.tensor_type
    dims = tensor.shape.dim
    match int(rng.integers(5)):
        case 0 if dims:
            pick(rng, dims).dim_value = pick(rng, EXTENTS)
        case 1 if dims:
            del dims[int(rng.integers(len(dims)))]
        case 2:
            dims.add().dim_value = pick(rng, EXTENTS)
        case 3:
            tensor.ClearField("shape")
        case _ if dims:
            pick(rng, dims).dim_param = pick(rng, ("M", "", "N"))


def value_type(model: onnx.ModelProto, rng: Rng) -> None:
    info = info_of(model, rng)
    kind = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    match int(rng.integers(4)):
        case 0:
            info.type.CopyFrom(helper.make_sequence_type_proto(kind))
        case 1:
            info.type.CopyFrom(helper.make_optional_type_proto(kind))
        case 2:
            info.ClearField("type")
        case _:
            info.type.tensor_type.elem_type = int(rng.integers(0, 30))


def names(model: onnx.ModelProto, rng: Rng) -> None:
    """Twice the same, empty, or unknown."""
    part = pick(rng, [tensor_of(model, rng), info_of(model, rng), node_of(model, rng)])
    part.name = name_of(model, rng)
    if rng.random() < 0.3:
        group = pick(rng, [model.graph.input, model.graph.output, model.graph.initializer])
        if group:
            group.add().CopyFrom(pick(rng, group))


def sparse(model: onnx.ModelProto, rng: Rng) -> None:
    held = model.graph.sparse_initializer.add()
    held.dims.extend([4, pick(rng, EXTENTS)])
    held.values.CopyFrom(helper.make_tensor("w1", TensorProto.FLOAT, [1], [1.0]))
    index = pick(rng, EXTENTS)
    held.indices.CopyFrom(helper.make_tensor("i", TensorProto.INT64, [1], [index]))
