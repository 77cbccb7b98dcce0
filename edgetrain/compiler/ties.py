"""Weights that are one parameter written twice: an embedding and the head tied to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from edgetrain.compiler.program import Tie

Weights = Mapping[str, npt.NDArray[np.float32]]


def find(weights: Weights) -> tuple[Tie, ...]:
    """The matrices that equal an earlier one, as it is or transposed.

    Exporters write a parameter that a network uses in two places as two tensors, often one
    of them transposed. Matrices that hold one value only, as those of a fresh layer may,
    are equal by chance and do not count.

    Time and memory are linear in the weights: matrices are compared by hash first.
    """
    ties: list[Tie] = []
    seen: dict[str, str] = {}
    for name, value in weights.items():
        if value.ndim != 2 or np.all(value == value.flat[0]):
            continue
        straight, turned = _digest(value), _digest(value.T)
        for digest, transposed in ((straight, False), (turned, True)):
            earlier = seen.get(digest)
            if earlier and np.array_equal(
                value, weights[earlier].T if transposed else weights[earlier]
            ):
                ties.append(Tie(name, earlier, transposed))
                break
        else:
            seen[straight] = name
    return tuple(ties)


def apply(graph: onnx.GraphProto, ties: Iterable[Tie]) -> None:
    """Compute each copy from its parameter, in place: the copy is an input no more."""
    ties = tuple(ties)
    copies = {tie.name for tie in ties}
    kept = [info for info in graph.input if info.name not in copies]
    del graph.input[:]
    graph.input.extend(kept)
    nodes = list(graph.node)
    del graph.node[:]
    for tie in ties:
        op = "Transpose" if tie.transposed else "Identity"  # of a matrix: it swaps its axes
        graph.node.append(helper.make_node(op, [tie.of], [tie.name]))
    graph.node.extend(nodes)


def expanded(weights: Weights, ties: Iterable[Tie]) -> dict[str, npt.NDArray[np.float32]]:
    """The weights with the copies that are computed from them."""
    values = dict(weights)
    for tie in ties:
        if tie.of in values:
            values[tie.name] = values[tie.of].T if tie.transposed else values[tie.of]
    return values


def _digest(matrix: npt.NDArray[np.float32]) -> str:
    head = repr(matrix.shape).encode()
    return hashlib.sha256(head + np.ascontiguousarray(matrix).tobytes()).hexdigest()
