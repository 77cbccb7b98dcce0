"""Edits of a graph that keep what it computes: order, dead nodes, constants, aliases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Final

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from edgetrain.compiler import limits
from edgetrain.errors import GraphError

_SCALARS: Final = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and every graph inside it."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from graphs(inner)


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of the graph and of every graph inside it."""
    for inner in graphs(graph):
        yield from inner.node


def reads(node: onnx.NodeProto) -> set[str]:
    """The names it reads, those its subgraphs capture included."""
    names = {name for name in node.input if name}
    for inner in subgraphs(node):
        names.update(out.name for out in inner.output)
        for child in inner.node:
            names |= reads(child)
    return names


def set_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    kept = list(nodes)
    del graph.node[:]
    graph.node.extend(kept)


def set_initializers(graph: onnx.GraphProto, tensors: Iterable[TensorProto]) -> None:
    kept = list(tensors)
    del graph.initializer[:]
    graph.initializer.extend(kept)


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Order the nodes so that each comes after what it reads; a sorted graph stays.

    Raises:
        GraphError: the graph has a cycle.
    """
    producer = {out: i for i, node in enumerate(graph.node) for out in node.output if out}
    needs = {
        index: {producer[name] for name in reads(node) if name in producer}
        for index, node in enumerate(graph.node)
    }
    if all(max(needed, default=-1) < index for index, needed in needs.items()):
        return
    try:
        order = list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        name = graph.node[error.args[1][0]].output[0]
        raise GraphError(
            f"the graph has a cycle through value {name!r}: the file is damaged or was"
            " edited; export it again"
        ) from error
    set_nodes(graph, [graph.node[index] for index in order])


def drop_dead(graph: onnx.GraphProto) -> None:
    """Remove nodes and initializers that no output depends on; nodes must be sorted."""
    used = {out.name for out in graph.output}
    kept = []
    for node in reversed(graph.node):
        if used.intersection(node.output):
            kept.append(node)
            used |= reads(node)
    set_nodes(graph, kept[::-1])
    set_initializers(graph, [t for t in graph.initializer if t.name in used])


def constant_tensor(node: onnx.NodeProto) -> TensorProto | None:
    """The value of a Constant node, named as its output; None if it is not numeric."""
    attribute = node.attribute[0]
    if attribute.name == "value":
        tensor = TensorProto()
        tensor.CopyFrom(attribute.t)
        tensor.name = node.output[0]
        return tensor
    dtype = _SCALARS.get(attribute.name)
    if dtype is None:
        return None
    value = np.asarray(helper.get_attribute_value(attribute), dtype)
    return numpy_helper.from_array(value, node.output[0])


def lift_constants(graph: onnx.GraphProto) -> None:
    """Turn Constant nodes, and ConstantOfShape of a constant, into initializers."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    kept = []
    for node in graph.node:
        tensor = None
        if node.op_type == "Constant":
            tensor = constant_tensor(node)
        elif node.op_type == "ConstantOfShape" and node.input[0] in tensors:
            tensor = filled_tensor(node, tensors[node.input[0]])
        if tensor is None:
            kept.append(node)
        else:
            tensors[tensor.name] = tensor
    set_nodes(graph, kept)
    set_initializers(graph, list(tensors.values()))


def filled_tensor(node: onnx.NodeProto, shape: TensorProto) -> TensorProto:
    """What a ConstantOfShape node makes of a constant shape."""
    dims = [int(extent) for extent in numpy_helper.to_array(shape).reshape(-1)]
    fill = numpy_helper.to_array(fill_value(node)).reshape(-1)
    limits.check_extents(node.output[0], dims, fill.itemsize)
    if fill.size != 1:
        raise GraphError(
            f"ConstantOfShape node {node.name or node.output[0]!r} fills with {fill.size}"
            " values instead of one; the file is damaged, export it again"
        )
    return numpy_helper.from_array(np.full(dims, fill[0]), node.output[0])


def fill_value(node: onnx.NodeProto) -> TensorProto:
    """The one-element tensor a ConstantOfShape node repeats; float zero by default."""
    for attribute in node.attribute:
        if attribute.name == "value":
            tensor: TensorProto = attribute.t
            return tensor
    return numpy_helper.from_array(np.zeros(1, np.float32))


def drop_aliases(graph: onnx.GraphProto) -> None:
    """Remove Identity, Dropout and Cast-to-same-type nodes; the graph has no subgraphs.

    Values keep their names, except that a value which only an alias made an output takes
    the output's name. An Identity stays where an output is an input, a constant or another
    output.
    """
    outputs = {out.name for out in graph.output}
    produced = {name for node in graph.node for name in node.output}
    types = _element_types(graph)
    renamed: dict[str, str] = {}
    kept = []
    for node in graph.node:
        if not _is_alias(node, types):
            kept.append(node)
            continue
        source, alias = _resolve(renamed, node.input[0]), node.output[0]
        if alias not in outputs:
            renamed[alias] = source
        elif source in produced and source not in outputs:
            renamed[source] = alias
        else:
            kept.append(helper.make_node("Identity", [source], [alias], node.name))
    for node in kept:
        node.input[:] = [_resolve(renamed, name) for name in node.input]
        node.output[:] = [_resolve(renamed, name) for name in node.output]
    set_nodes(graph, kept)


def settle_casts(graph: onnx.GraphProto) -> None:
    """CastLike says by example which type it wants; where that is known, Cast says it."""
    types = _element_types(graph)
    for node in graph.node:
        if node.op_type == "CastLike" and types.get(node.input[1]):
            node.op_type = "Cast"
            node.attribute.append(helper.make_attribute("to", types[node.input[1]]))
            del node.input[1:]


def _resolve(renamed: dict[str, str], name: str) -> str:
    while name in renamed:
        name = renamed[name]
    return name


def _is_alias(node: onnx.NodeProto, types: dict[str, int]) -> bool:
    if node.op_type == "Cast":
        to = next(a.i for a in node.attribute if a.name == "to")
        return bool(types.get(node.input[0]) == to)
    return node.op_type in ("Identity", "Dropout")


def _element_types(graph: onnx.GraphProto) -> dict[str, int]:
    infos = (*graph.input, *graph.value_info)
    types = {info.name: info.type.tensor_type.elem_type for info in infos}
    types.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    return types
