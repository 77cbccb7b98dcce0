"""Refusing malformed models, once and first, so that nothing behind has to expect one.

Tools in C++ that later work on the model trust it: what they do with a node that lacks an
input, or with functions that call each other, is not defined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from typing import Final

import onnx

from edgetrain.compiler import call_check, intake, limits, node_check, tensor_check
from edgetrain.compiler.tidy import graphs, subgraphs
from edgetrain.errors import GraphError

_DAMAGED: Final = "the file is damaged or was edited; export it again"


def admit(model: onnx.ModelProto, place: str = "the model") -> None:
    """Check that a model is well formed: bounds, names, tensors, nodes, functions.

    Whether it can be trained, and whether its shapes fit each other, is not checked.

    Args:
        model: with its external data; it is not altered.
        place: what to call it in messages.

    Raises:
        GraphError: it is malformed, absurdly large, or of an opset that cannot be read.
    """
    _check_depth(model.graph, place, 1)
    _check_text(model, place)
    intake.check_opset(model)
    call_check.check(model, place)
    tensor_check.check(model, place)
    for function in model.functions:
        _check_reads(
            function.node, (*function.input, *function.output), set(function.input), place
        )
    _check_scope(model.graph, frozenset(), place)
    node_check.check(model.graph, intake.opset(model), place)
    if not model.graph.output:
        raise GraphError(f"{place} has no outputs; {_DAMAGED}")
    repeated = _repeated(out.name for out in model.graph.output)
    if repeated:
        raise GraphError(f"{place} gives the output {repeated[0]!r} twice; {_DAMAGED}")


def _check_depth(graph: onnx.GraphProto, place: str, depth: int) -> None:
    if depth > limits.MAX_DEPTH:
        raise GraphError(
            f"{place} has graphs within graphs, more than {limits.MAX_DEPTH} deep;"
            f" {_DAMAGED}"
        )
    for node in graph.node:
        for inner in subgraphs(node):
            _check_depth(inner, place, depth + 1)


def _check_text(model: onnx.ModelProto, place: str) -> None:
    """Protobuf gives bytes where a text is none."""
    for text in _texts(model):
        if isinstance(text, bytes):
            raise GraphError(f"{place}: the name {text!r} is not UTF-8; {_DAMAGED}")


def _texts(model: onnx.ModelProto) -> Iterator[str]:
    yield model.graph.name
    nodes = [node for function in model.functions for node in function.node]
    for graph in graphs(model.graph):
        nodes.extend(graph.node)
        for part in (*graph.input, *graph.output, *graph.initializer):
            yield part.name
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)


def _check_scope(graph: onnx.GraphProto, outer: Set[str], place: str) -> None:
    """Each name means one thing, and each that is read means something."""
    tensors = [tensor.name for tensor in graph.initializer]
    tensors += [tensor.values.name for tensor in graph.sparse_initializer]
    inputs = [info.name for info in graph.input]
    # An initializer may be an input too: then it is the input's default.
    defaults = set(inputs)
    given = [*inputs, *(name for name in tensors if name not in defaults)]
    made = [name for node in graph.node for name in node.output if name]
    for names in (tensors, [*given, *made]):
        repeated = _repeated(names)
        if repeated:
            raise GraphError(
                f"{place}: the value {repeated[0]!r} is defined twice; {_DAMAGED}"
            )
    if "" in given or any(not out.name for out in graph.output):
        raise GraphError(
            f"{place}: an input, output or initializer has no name; {_DAMAGED}"
        )
    defined = outer | {*given, *made}
    _check_reads(graph.node, (out.name for out in graph.output), defined, place)
    for node in graph.node:
        for inner in subgraphs(node):
            _check_scope(inner, defined, place)


def _check_reads(
    nodes: Iterable[onnx.NodeProto], outputs: Iterable[str], known: Set[str], place: str
) -> None:
    nodes = list(nodes)
    defined = {"", *known, *(name for node in nodes for name in node.output)}
    wanted = dict.fromkeys(outputs, "the list of outputs")
    for node in nodes:
        wanted.update(dict.fromkeys(node.input, f"node {node.name or node.op_type!r}"))
    for name, reader in wanted.items():
        if name not in defined:
            raise GraphError(
                f"{place}: {reader} needs the value {name!r}, which nothing produces;"
                f" {_DAMAGED}"
            )


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
