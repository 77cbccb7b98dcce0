"""Attention rows of which a mask leaves nothing: no value there, and no derivative.

Softmax of a row of minus infinities is not a number. Exported attention replaces such
rows by zeros afterwards, which mends the values but not the derivatives: 0 times NaN is
NaN. So the scores are bounded below before the Softmax, where no finite one is touched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgetrain.compiler.tidy import set_nodes

LOWEST: Final = float(np.finfo(np.float32).min)
_BOUND: Final = "et/lowest"
_ALIASES: Final = frozenset({"Cast", "Identity"})


def guard_masked_rows(graph: onnx.GraphProto) -> None:
    """Bound the scores of each Softmax that a Where corrects, in place.

    What the graph computes stays the same, but for rows that it computes as NaN and does
    not replace. A graph that was guarded before stays as it is.

    Args:
        graph: at our opset, float32, its nodes sorted.
    """
    makers = {name: node for node in graph.node for name in node.output}
    guarded: dict[str, onnx.NodeProto] = {}
    tests: dict[str, onnx.NodeProto] = {}
    for node in graph.node:
        if node.op_type != "Where":
            continue
        for softmax in filter(None, (_softmax(makers, name) for name in node.input[1:])):
            if softmax.input[0] == _scores(softmax):
                continue
            guarded[softmax.output[0]] = softmax
            test = makers.get(node.input[0])
            if _tests(makers, test, softmax):
                tests[node.input[0]] = softmax
    if guarded:
        _rewrite(graph, guarded, tests)


def _rewrite(
    graph: onnx.GraphProto,
    guarded: Collection[str],
    tests: Mapping[str, onnx.NodeProto],
) -> None:
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.output[0] in tests:
            kept += _row_test(tests[node.output[0]], node.output[0])
            continue
        if node.output[0] in guarded:
            kept.append(_bound(node))
        kept.append(node)
    bound = np.array(LOWEST, np.float32)
    graph.initializer.append(numpy_helper.from_array(bound, _BOUND))
    for axis in sorted({_axis(softmax) for softmax in tests.values()}):
        value = np.array([axis], np.int64)
        graph.initializer.append(numpy_helper.from_array(value, _axis_name(axis)))
    set_nodes(graph, kept)


def _tests(
    makers: Mapping[str, onnx.NodeProto],
    test: onnx.NodeProto | None,
    softmax: onnx.NodeProto,
) -> bool:
    """Whether a node asks of this Softmax where it is not a number."""
    if test is None or test.op_type != "IsNaN":
        return False
    return _softmax(makers, test.input[0]) is softmax


def _bound(softmax: onnx.NodeProto) -> onnx.NodeProto:
    """Let a Softmax read bounded scores, which the returned node makes."""
    given, scores = softmax.input[0], _scores(softmax)
    softmax.input[0] = scores
    return helper.make_node("Clip", [given, _BOUND], [scores])


def _row_test(softmax: onnx.NodeProto, result: str) -> list[onnx.NodeProto]:
    """Whether a row's largest score is the bound, of every element, as IsNaN said."""
    scores, axis = _scores(softmax), _axis_name(_axis(softmax))
    row, each = f"{result}/largest", f"{result}/largest_of_row"
    return [
        helper.make_node("ReduceMax", [scores, axis], [row]),
        helper.make_node("Max", [scores, row], [each]),
        helper.make_node("Equal", [each, _BOUND], [result]),
    ]


def _scores(softmax: onnx.NodeProto) -> str:
    return f"{softmax.output[0]}/bounded_scores"


def _axis(softmax: onnx.NodeProto) -> int:
    return next((int(a.i) for a in softmax.attribute if a.name == "axis"), -1)


def _axis_name(axis: int) -> str:
    return f"et/axis_{axis}"


def _softmax(makers: Mapping[str, onnx.NodeProto], name: str) -> onnx.NodeProto | None:
    """The Softmax that makes a value, but for casts and copies."""
    node = makers.get(name)
    while node is not None and node.op_type in _ALIASES:
        node = makers.get(node.input[0])
    return node if node is not None and node.op_type == "Softmax" else None
