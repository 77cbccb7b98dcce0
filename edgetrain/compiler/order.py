"""In which order a graph lists its nodes, for an engine that evaluates depth first."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import replace

from edgetrain.compiler.build import Node


def lean_order(nodes: Sequence[Node], seeds: Collection[str]) -> list[Node]:
    """Order nodes so that few values of a backward graph are alive at once.

    ONNX Runtime does not run nodes as they are listed. It starts from the last node
    whose outputs no other node reads, and goes back from there, from each node to the
    last listed of those that it reads first; then it takes the last but one, and so on.
    Left as emitted, it would compute the gradient of the first weight at once, keep the
    cotangents of all layers for the other weights' gradients, and compute all masks before
    it has a cotangent to apply them to. So

    - gradients are listed last and in reverse, which makes it take each as soon as its
      layer's cotangent is there;
    - what depends on no cotangent is listed first, which makes it wait until a cotangent
      needs it.

    What is computed stays the same. An engine with an order of its own loses nothing.

    Args:
        nodes: in execution order, all of them needed.
        seeds: the cotangents and labels that come in.
    """
    read = {name for node in nodes for name in node.reads}
    late = set(seeds)
    groups: tuple[list[Node], list[Node], list[Node]] = ([], [], [])
    for node in nodes:
        if not late.isdisjoint(node.reads):
            late.update(node.outputs)
        ends = read.isdisjoint(node.outputs)
        groups[2 if ends else int(not late.isdisjoint(node.outputs))].append(node)
    early, between, last = groups
    return [*early, *between, *reversed(last)]


def depth_first(nodes: Sequence[Node]) -> list[Node]:
    """The order in which ONNX Runtime runs nodes that are listed like this.

    See `lean_order`. What its optimizer did to the list before is not part of it.
    """
    place = {name: index for index, node in enumerate(nodes) for name in node.outputs}
    read = {name for node in nodes for name in node.reads}
    ends = [i for i, node in enumerate(nodes) if read.isdisjoint(node.outputs)]
    order: list[Node] = []
    seen: set[int] = set()
    todo = [(index, False) for index in ends]
    while todo:
        index, ready = todo.pop()
        if ready:
            order.append(nodes[index])
        elif index not in seen:
            seen.add(index)
            todo.append((index, True))
            before = {place[name] for name in nodes[index].reads if name in place}
            todo += [(i, False) for i in sorted(before - seen)]
    return order


def relisted(nodes: Sequence[Node], kept: Set[str]) -> list[Node]:
    """The nodes as ONNX Runtime's optimizer lists them, where that keeps values longer.

    It computes equal values once, and it merges each MatMul with the Transposes that it
    reads into a new node; these come last in the list, in the order in which they would
    have run. What else it does leaves fewer values, and few of them for longer.

    Args:
        nodes: in execution order.
        kept: the graph's outputs.
    """
    place = {node.output: index for index, node in enumerate(nodes)}
    same: dict[str, str] = {}
    first: dict[str, Node] = {}
    turned: dict[str, str] = {}
    groups: tuple[list[Node], list[Node]] = ([], [])
    for given in depth_first(nodes):
        node = replace(given, inputs=tuple(same.get(n, n) for n in given.inputs))
        key = repr(
            (node.op_type, node.domain, node.inputs, sorted(node.attributes.items()))
        )
        if kept.isdisjoint(node.outputs) and key in first:
            same |= zip(node.outputs, first[key].outputs, strict=False)
            continue
        first.setdefault(key, node)
        if _turns(node):
            turned[node.output] = node.inputs[0]
        merges = node.op_type == "MatMul" and not turned.keys().isdisjoint(node.inputs)
        if merges:
            node = replace(node, inputs=tuple(turned.get(n, n) for n in node.inputs))
        groups[merges].append(node)
    plain, merged = groups
    read = {*kept, *(name for node in (*plain, *merged) for name in node.reads)}
    left = [node for node in plain if not _turns(node) or node.output in read]
    return [*sorted(left, key=lambda node: place[node.output]), *merged]


def _turns(node: Node) -> bool:
    """Whether it exchanges the last two axes."""
    perm = [*node.get("perm", ())]
    axes = [*range(len(perm))]
    return node.op_type == "Transpose" and perm == [*axes[:-2], *axes[:-3:-1]] != axes
