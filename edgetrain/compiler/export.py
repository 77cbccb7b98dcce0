"""Writing trained weights into the user's own model, and proving nothing else moved."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import Message
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from edgetrain.compiler import sites, ties
from edgetrain.compiler.program import Program
from edgetrain.compiler.tidy import graphs
from edgetrain.compiler.weights import Use, is_weight, uses
from edgetrain.errors import GraphError

Array = npt.NDArray[Any]
Weights = Mapping[str, npt.NDArray[np.float32]]
Part = onnx.NodeProto | TensorProto
Put = Callable[[TensorProto, Array], None]


def export(
    original: onnx.ModelProto, program: Program, weights: Weights
) -> onnx.ModelProto:
    """A copy of the user's model in which only the values of weights are new.

    Nodes, names, order, opset, metadata and the tensors' types and storage stay. Elements
    that training did not change keep the file's exact value, also where its type is wider
    than float32. Two kinds of node can only hold one value for all elements, or repeat
    another tensor: a ConstantOfShape and an Identity whose weight no longer does so become
    a Constant of the same name, in the same place.

    Args:
        original: the model that was normalised.
        program: what `normalise` made of it.
        weights: new value of each weight; weights left out keep theirs.

    Raises:
        GraphError: a weight is unknown or of another shape, or the model is another one.
    """
    model = onnx.ModelProto()
    model.CopyFrom(original)
    write(model, program, weights, fill)
    return model


def write(model: onnx.ModelProto, program: Program, weights: Weights, put: Put) -> None:
    """Bring the values of weights into a model that was normalised, in place.

    Args:
        model: to be changed.
        program: what `normalise` made of it.
        weights: new value of each weight; weights left out keep theirs.
        put: replaces the elements of a tensor.

    Raises:
        GraphError: a weight is unknown or of another shape, or the model is another one.
    """
    held = sites.find(model)
    for name, value in weights.items():
        expected = program.weights.get(name)
        if expected is None or name not in held:
            raise GraphError(f"{name!r} is not a weight of the model")
        if value.shape != expected.shape:
            raise GraphError(
                f"weight {name!r} has shape {list(value.shape)}, the model's has"
                f" {list(expected.shape)}"
            )
    before = ties.expanded(program.weights, program.ties)
    current = ties.expanded({**program.weights, **weights}, program.ties)
    for name, value in current.items():
        _write(held[name], value, before[name], put)
    for name, value in current.items():
        root, node = _root(held, name), held[name].node
        repeated = current.get(root, before[name])
        if root != name and node is not None and not _equal(value, repeated):
            _make_constant(node, held[name].source.dtype, value)


def _root(held: Mapping[str, sites.Site], name: str) -> str:
    """The tensor that a chain of Identity nodes repeats."""
    while alias := held[name].alias_of:
        name = alias
    return name


def _write(site: sites.Site, value: Array, before: Array, put: Put) -> None:
    if site.alias_of:
        return
    if site.tensor is None and site.node is not None:
        if not _equal(value, before):
            _make_constant(site.node, site.source.dtype, value)
    elif site.node is not None and site.node.attribute[0].name != "value":
        attribute = site.node.attribute[0]
        if attribute.name == "value_float":
            attribute.f = float(value)
        else:
            attribute.floats[:] = value.tolist()
    elif site.tensor is not None:
        put(site.tensor, value)


def changed(old: Array, value: Array) -> Array:
    """The trained value in the old one's type; elements that did not change stay exact."""
    new = value.astype(old.dtype)
    if old.dtype == np.float32:
        return new
    return np.where(old.astype(np.float32) == value, old, new)


def fill(tensor: TensorProto, value: Array) -> None:
    """Replace the tensor's elements in the field that holds them."""
    new = changed(numpy_helper.to_array(tensor), value)
    if tensor.HasField("raw_data"):
        little = new if sys.byteorder == "little" else new.byteswap()
        tensor.raw_data = little.tobytes()
    elif tensor.data_type == TensorProto.FLOAT:
        tensor.float_data[:] = new.reshape(-1).tolist()
    elif tensor.data_type == TensorProto.DOUBLE:
        tensor.double_data[:] = new.reshape(-1).tolist()
    else:
        tensor.int32_data[:] = new.reshape(-1).view(np.uint16).tolist()


def _make_constant(node: onnx.NodeProto, dtype: str, value: Array) -> None:
    tensor = numpy_helper.from_array(value.astype(dtype), node.output[0])
    node.op_type = "Constant"
    del node.input[:]
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("value", tensor))


def _equal(a: Array, b: Array) -> bool:
    return np.array_equal(a, b, equal_nan=True)


def differences(a: onnx.ModelProto, b: onnx.ModelProto) -> list[str]:
    """Name everything in which two models differ, other than the values of weights.

    Weights are the float initializers and Constant values that training may change, by
    their place in the graph; settings, such as the scales of a Resize, are compared. So
    are the type, shape and storage of weights.
    """
    left, right = _blank(a), _blank(b)
    found = list(_parts("node", left.graph.node, right.graph.node))
    found += _parts("initializer", left.graph.initializer, right.graph.initializer)
    for model in (left, right):
        del model.graph.node[:]
        del model.graph.initializer[:]
    found += _fields("graph.", left.graph, right.graph)
    left.ClearField("graph")
    right.ClearField("graph")
    found += _fields("", left, right)
    return found


def _parts(kind: str, a: Sequence[Part], b: Sequence[Part]) -> Iterator[str]:
    for index, (one, other) in enumerate(zip_longest(a, b)):
        if one is None or other is None:
            present = one if other is None else other
            yield f"{kind} {_label(present)}: only in the {'first' if one else 'second'}"
        elif one != other:
            fields = ", ".join(_fields("", one, other))
            yield f"{kind} {index} {_label(one)}: {fields}"


def _fields(prefix: str, a: Message, b: Message) -> Iterator[str]:
    """The names of the fields that differ."""
    for name in a.DESCRIPTOR.fields_by_name:
        if getattr(a, name) != getattr(b, name):
            yield prefix + name


def _label(part: Part) -> str:
    if isinstance(part, onnx.NodeProto):
        return f"{part.name or ', '.join(part.output)!r} ({part.op_type})"
    return repr(part.name)


def _blank(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without the values of weights; the length of their data stays."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    readers = uses(copy.graph)
    for graph in graphs(copy.graph):
        for tensor in graph.initializer:
            _blank_tensor(tensor, readers.get(tensor.name, []))
        for node in graph.node:
            if node.op_type == "Constant":
                _blank_attribute(node.attribute[0], readers.get(node.output[0], []))
    return copy


def _blank_attribute(attribute: AttributeProto, readers: list[Use]) -> None:
    if attribute.name == "value":
        _blank_tensor(attribute.t, readers)
    elif attribute.name in ("value_float", "value_floats"):
        value = np.asarray(helper.get_attribute_value(attribute), np.float32)
        if is_weight(value, readers):
            attribute.f = 0.0
            attribute.floats[:] = [0.0] * len(attribute.floats)


def _blank_tensor(tensor: TensorProto, readers: list[Use]) -> None:
    if not sites.is_float(tensor.data_type):
        return
    if not is_weight(numpy_helper.to_array(tensor).astype(np.float32), readers):
        return
    if tensor.HasField("raw_data"):
        tensor.raw_data = bytes(len(tensor.raw_data))
    for values in (tensor.float_data, tensor.double_data):
        values[:] = [0.0] * len(values)
    tensor.int32_data[:] = [0] * len(tensor.int32_data)
