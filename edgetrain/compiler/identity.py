"""The layers of a residual stage that a skip connection ties to the stage's end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.segments import Layer

# They hand on what they are given, when a model is not being trained.
_TRANSPARENT: Final = frozenset({"Identity", "Dropout", "Cast"})


@dataclass(frozen=True, slots=True)
class Residual:
    """What takes the cotangent of the stage's end as its own.

    Attributes:
        layers: the last linear layer of each residual branch, last one first; and the one
            that begins the stream, if it does so in the stage.
        source: the received value that the stream comes from; empty: none does.
        begin: the value that the stream begins with, received or made.
    """

    layers: tuple[Layer, ...]
    source: str
    begin: str = ""


def residual(
    g: GraphBuilder, nodes: Sequence[Node], layers: Sequence[Layer], end: str
) -> Residual:
    """Follow the stream of a residual stage from its end back to its start.

    The stream is y = x + f(x), and x again such a sum, all of one shape. What a layer that
    ends a branch f makes is added to the end as it is, and passes through later branches
    besides: the cotangent of the end is a part of its own, and all of it at the last sum.

    Args:
        g: knows the shapes.
        nodes: the stage's, in execution order.
        layers: those with weights to train.
        end: the value whose cotangent arrives.
    """
    makers = {name: node for node in nodes for name in node.outputs if name}
    by_name = {layer.name: layer for layer in layers}
    found: list[Layer] = []
    value = end
    while True:
        value = _opaque(makers, value)
        node = makers.get(value)
        if value in by_name and (node is None or not _is_sum(g, node)):
            return Residual((*found, by_name[value]) if found else (), "", value)
        if node is None:
            return Residual(tuple(found), value if found else "", value)
        if not _is_sum(g, node):
            return Residual(tuple(found), "", value)
        stream, branch = _sides(makers, node)
        ends = [
            _opaque(makers, name)
            for name in (branch, *(() if stream else (node.inputs[0],)))
        ]
        found += [by_name[name] for name in ends if name in by_name]
        if not stream:  # a projection: the stream of this width begins here
            return Residual(tuple(found), "", node.output)
        value = stream


def _is_sum(g: GraphBuilder, node: Node) -> bool:
    """Whether it adds two values of its own shape that depend on data."""
    return node.op_type == "Add" and all(
        not g.is_constant(name) and g.shape(name) == g.shape(node.output)
        for name in node.inputs
    )


def _opaque(makers: Mapping[str, Node], value: str) -> str:
    while value in makers and makers[value].op_type in _TRANSPARENT:
        value = makers[value].inputs[0]
    return value


def _sides(makers: Mapping[str, Node], node: Node) -> tuple[str, str]:
    """The stream and the branch of a sum; no stream where neither comes from the other."""
    a, b = node.inputs
    if _depends(makers, b, a):
        return a, b
    if _depends(makers, a, b):
        return b, a
    return "", b


def _depends(makers: Mapping[str, Node], value: str, on: str) -> bool:
    pending, seen = [value], {value}
    while pending:
        name = pending.pop()
        if name == on:
            return True
        fresh = set(makers[name].inputs) - seen if name in makers else set()
        seen |= fresh
        pending.extend(fresh)
    return False
