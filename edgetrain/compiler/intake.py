"""What a model must be before it is rewritten: refusals, inference form, float32."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, inliner, numpy_helper

from edgetrain.compiler import node_check
from edgetrain.compiler.tidy import all_nodes, graphs, sort_nodes, subgraphs
from edgetrain.errors import GraphError

MIN_OPSET: Final = 7
_MIN_IR: Final = 8  # from 4 on an initializer need not be an input too
_STANDARD: Final = frozenset({"", "ai.onnx"})
# ONNX Runtime's CPU kernels do not run these: only a float32 form can be compared with.
BFLOAT16: Final = frozenset({TensorProto.BFLOAT16})
OTHER_FLOATS: Final = frozenset({TensorProto.FLOAT16, TensorProto.DOUBLE})
_QUANTISED: Final = re.compile("^Q|Quantize|NBits|Integer")
_ELEMENT_TYPES: Final = frozenset(helper.get_all_tensor_dtypes())
# Attributes that name the element type of a node's output.
_TYPE_ATTRIBUTES: Final = frozenset({"to", "dtype", "output_dtype", "softmax_precision"})


def opset(model: onnx.ModelProto) -> int:
    """The version of the standard operators the model uses; 0 when it names none."""
    return max((o.version for o in model.opset_import if o.domain in _STANDARD), default=0)


def open_up(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with functions inlined, nodes sorted and only true inputs as inputs.

    Raises:
        GraphError: an opset, operator or value kind that cannot be handled.
    """
    _check_values(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if copy.functions:
        copy = _inlined(copy)
    graph = copy.graph
    held = {tensor.name for tensor in graph.initializer}
    inputs = [info for info in graph.input if info.name not in held]
    del graph.input[:]
    graph.input.extend(inputs)
    del graph.value_info[:]
    for node in all_nodes(graph):
        _check_domain(node)
        node.domain = ""
    version = opset(copy)
    del copy.opset_import[:]
    copy.opset_import.append(helper.make_opsetid("", version))
    copy.ir_version = max(copy.ir_version, _MIN_IR)
    _drop_ambiguous_names(graph)
    sort_nodes(graph)
    return copy


def _drop_ambiguous_names(graph: onnx.GraphProto) -> None:
    """Node names mean nothing, but ONNX Runtime wants them different.

    A node without a name goes by its output's.
    """
    seen = {name for node in all_nodes(graph) for name in node.output}
    for node in all_nodes(graph):
        if node.name in seen and node.name not in node.output[:1]:
            node.name = ""
        seen.add(node.name)


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        model = inliner.inline_local_functions(model)
    except (RuntimeError, onnx.checker.ValidationError) as error:
        raise GraphError(
            f"the model's functions cannot be written out: {error}; export it without local"
            " functions"
        ) from error
    node_check.check(model.graph, opset(model), "the model")
    return model


def fix_inputs(
    model: onnx.ModelProto, values: Mapping[str, float], batch: int
) -> onnx.ModelProto:
    """Make constants of inputs that are no data, such as a first state, in place.

    Args:
        model: its inputs are not bound to static shapes yet.
        values: of every element of an input; extents that the file leaves open are `batch`.
        batch: samples a microbatch.

    Raises:
        GraphError: there is no such input, or it has no known rank.
    """
    graph = model.graph
    inputs = {info.name: info.type.tensor_type for info in graph.input}
    for name, value in values.items():
        if name not in inputs or not inputs[name].HasField("shape"):
            raise GraphError(
                f"a value is given for {name!r}, which is not an input of known rank;"
                f" the inputs are {sorted(inputs)}"
            )
        shape = [max(0, dim.dim_value) or batch for dim in inputs[name].shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(inputs[name].elem_type)
        tensor = numpy_helper.from_array(np.full(shape, value, dtype), name)
        graph.initializer.append(tensor)
    kept = [info for info in graph.input if info.name not in values]
    del graph.input[:]
    graph.input.extend(kept)
    return model


def to_inference(model: onnx.ModelProto) -> onnx.ModelProto:
    """Switch Dropout and BatchNormalization to inference, in place.

    Raises:
        GraphError: a node reads what only training produces, such as a Dropout mask.
    """
    read = {name for node in all_nodes(model.graph) for name in node.input}
    read.update(out.name for out in model.graph.output)
    for node in all_nodes(model.graph):
        if node.op_type not in ("Dropout", "BatchNormalization"):
            continue
        for name in node.output[1:]:
            if name and name in read:
                raise GraphError(
                    f"{node.op_type} node {_label(node)} also gives {name!r}, which the"
                    " graph uses and inference does not have; export it in eval mode"
                )
        del node.output[1:]
        if node.op_type == "Dropout":
            del node.input[2:]
        _drop_attribute(node, "training_mode")
    return model


def to_float32(
    model: onnx.ModelProto, types: frozenset[int] = OTHER_FLOATS
) -> frozenset[str]:
    """Make every tensor of the graph that has one of the types a float, in place.

    Returns:
        The types that were replaced, as numpy names them.
    """
    found = set()
    for graph in graphs(model.graph):
        for info in (*graph.input, *graph.output):
            tensor_type = info.type.tensor_type
            if tensor_type.elem_type in types:
                found.add(tensor_type.elem_type)
                tensor_type.elem_type = TensorProto.FLOAT
        for tensor in graph.initializer:
            found |= _widen(tensor, types)
        for node in graph.node:
            found |= _widen_attributes(node, types)
    return frozenset(helper.tensor_dtype_to_np_dtype(t).name for t in found)


def _widen_attributes(node: onnx.NodeProto, types: frozenset[int]) -> set[int]:
    found = set()
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            found |= _widen(attribute.t, types)
        elif attribute.name in _TYPE_ATTRIBUTES and attribute.i in types:
            found.add(attribute.i)
            attribute.i = TensorProto.FLOAT
    return found


def _widen(tensor: TensorProto, types: frozenset[int]) -> set[int]:
    data_type = tensor.data_type
    if data_type not in types:
        return set()
    value = numpy_helper.to_array(tensor).astype("float32")
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return {data_type}


def check_opset(model: onnx.ModelProto) -> None:
    """Raises GraphError for an opset that is older or newer than what can be read."""
    version, newest = opset(model), onnx.defs.onnx_opset_version()
    if not MIN_OPSET <= version <= newest:
        raise GraphError(
            f"the model uses opset {version}; {MIN_OPSET} to {newest} can be read."
            " Export it again with opset_version=20"
        )


def _check_values(model: onnx.ModelProto) -> None:
    graph = model.graph
    for sparse in graph.sparse_initializer:
        raise GraphError(
            f"initializer {sparse.values.name!r} is sparse, which cannot be trained;"
            " store it as a dense tensor"
        )
    for info in (*graph.input, *graph.output):
        if not info.type.HasField("tensor_type"):
            kind = info.type.WhichOneof("value") or "value of unknown type"
            raise GraphError(
                f"{info.name!r} is a {kind.removesuffix('_type')}, not a tensor; export a"
                " model whose inputs and outputs are tensors"
            )
        if info.type.tensor_type.elem_type not in _ELEMENT_TYPES:
            raise GraphError(
                f"{info.name!r} has no known element type"
                f" ({info.type.tensor_type.elem_type}); export the model with typed inputs"
            )
        if info.type.tensor_type.elem_type == TensorProto.STRING:
            raise GraphError(
                f"{info.name!r} holds strings; export the model without its text processing"
            )


def _check_domain(node: onnx.NodeProto) -> None:
    if node.domain == "com.microsoft" and _QUANTISED.search(node.op_type):
        raise GraphError(
            f"node {_label(node)} is ONNX Runtime's quantised op {node.op_type}, through"
            " which no gradient passes; train the float model that this file was made from,"
            " and quantise the result"
        )
    if node.domain not in _STANDARD:
        raise GraphError(
            f"node {_label(node)} is the custom op {node.domain}::{node.op_type}, which has"
            " no known derivative; export the model with standard ONNX operators only"
        )
    if any(a.HasField("sparse_tensor") for a in node.attribute):
        raise GraphError(
            f"node {_label(node)} holds a sparse tensor; store it as a dense one"
        )


def refuse_control_flow(graph: onnx.GraphProto) -> None:
    """Raises GraphError for the first node that has a graph of its own."""
    for node in graph.node:
        if any(subgraphs(node)):
            raise GraphError(
                f"{node.op_type} node {_label(node)} depends on the data, and control flow"
                " cannot be trained; export the model with fixed shapes and without Python"
                " branches or loops on tensor values"
            )


def _drop_attribute(node: onnx.NodeProto, name: str) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)


def _label(node: onnx.NodeProto) -> str:
    return repr(node.name or (node.output[0] if node.output else node.op_type))
