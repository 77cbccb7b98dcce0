"""In which order a graph lists its nodes, for an engine that evaluates depth first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
