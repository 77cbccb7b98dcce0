"""Functions of a model: that they do not call themselves, and what they amount to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

import onnx

from edgetrain.compiler import limits
from edgetrain.compiler.tidy import all_nodes, subgraphs
from edgetrain.errors import GraphError

Key = tuple[str, str]


def check(model: onnx.ModelProto, place: str) -> None:
    """Bound the nodes of a model, its functions written out at every call.

    Raises:
        GraphError: functions call each other in a circle, or there are too many nodes.
    """
    bodies = {(f.domain, f.name): _nodes(f.node) for f in model.functions}
    calls = {key: _called(nodes, bodies) for key, nodes in bodies.items()}
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        raise GraphError(
            f"{place}: function {'::'.join(error.args[1][0])!r} calls itself, directly or"
            " through others, which ONNX does not allow; export the model again"
        ) from error
    sizes: dict[Key, int] = {}
    depths: dict[Key, int] = {}
    for key in order:
        sizes[key] = _size(bodies[key], sizes)
        depths[key] = 1 + max((depths[inner] for inner in calls[key]), default=0)
    size = _size(list(all_nodes(model.graph)), sizes)
    deepest = max(depths.values(), default=0)
    if size > limits.MAX_NODES or deepest > limits.MAX_CALLS_DEEP:
        raise GraphError(
            f"{place} has {size} nodes with its functions written out, which call each"
            f" other {deepest} deep; {limits.MAX_NODES} nodes and {limits.MAX_CALLS_DEEP}"
            " calls are the most that are read: the file is damaged, or export the model"
            " without local functions"
        )


def _nodes(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes and those of the graphs in them."""
    found = list(nodes)
    for node in list(found):
        for inner in subgraphs(node):
            found.extend(all_nodes(inner))
    return found


def _called(nodes: Iterable[onnx.NodeProto], bodies: Mapping[Key, object]) -> set[Key]:
    return {(n.domain, n.op_type) for n in nodes}.intersection(bodies)


def _size(nodes: Iterable[onnx.NodeProto], sizes: Mapping[Key, int]) -> int:
    return sum(sizes.get((node.domain, node.op_type), 1) for node in nodes)
