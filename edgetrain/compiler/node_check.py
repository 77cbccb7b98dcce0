"""Nodes against the standard's own description of their operator."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Final

import onnx
from onnx import AttributeProto

from edgetrain.compiler import limits
from edgetrain.compiler.tidy import all_nodes
from edgetrain.errors import GraphError

_STANDARD: Final = frozenset({"", "ai.onnx"})
# Engines cut other settings down to 32 bits without a word.
_LARGEST_INT: Final = (1 << 31) - 1
_WIDE: Final = frozenset({"end", "ignore_index", "start", "value_int"})
# 0 or 1: engines differ in what they make of other numbers.
_FLAGS: Final = frozenset(
    {"allowzero", "antialias", "ceil_mode", "count_include_pad", "exclude_outside"}
    | {"exclusive", "fmod", "input_forget", "keepdims", "linear_before_reset"}
    | {"noop_with_empty_axes", "reverse", "training_mode", "transA", "transB", "upper"}
)
_SINGLE: Final = onnx.defs.OpSchema.FormalParameterOption.Single
_KINDS: Final[Mapping[int, onnx.defs.OpSchema.AttrType]] = {
    value: getattr(onnx.defs.OpSchema.AttrType, name)
    for name, value in AttributeProto.AttributeType.items()
    if value != AttributeProto.UNDEFINED
}


def check(graph: onnx.GraphProto, version: int, place: str) -> None:
    """Check the nodes of a graph and of the graphs within it.

    Nodes of other domains are not described by the standard, and pass. So do attributes
    that the operator does not have: some exporters add their own.

    Args:
        graph: functions may still be called in it.
        version: the opset.
        place: what to call the model in messages.

    Raises:
        GraphError: an unknown operator; inputs, outputs or attributes that are missing, too
            many, or of the wrong kind.
    """
    for node in all_nodes(graph):
        problem = _problem(node, version)
        if problem:
            name = node.name or ", ".join(node.output)
            raise GraphError(
                f"{node.op_type} node {name!r} of {place} {problem}: the file is damaged or"
                " was edited; export it again, with opset_version=20 and standard operators"
            )


def _problem(node: onnx.NodeProto, version: int) -> str:
    attributes = _attribute_problem(node)
    if attributes or node.domain not in _STANDARD:
        return attributes
    schema = _schema(node.op_type, version)
    if schema is None:
        return f"is of no operator that opset {version} has"
    if node.op_type == "Constant" and len(node.attribute) != 1:
        return f"has {len(node.attribute)} values"
    checks = (_arity_problem, _kind_problem, _branch_problem, _window_problem)
    return next(filter(None, (check(node, schema) for check in checks)), "")


def _attribute_problem(node: onnx.NodeProto) -> str:
    counts = Counter(attribute.name for attribute in node.attribute)
    for attribute in node.attribute:
        if attribute.type not in _KINDS:
            return f"has the attribute {attribute.name!r} of no known kind"
        if attribute.ref_attr_name:
            return f"takes the attribute {attribute.name!r} of a function it is not in"
        if attribute.type == AttributeProto.TENSOR and not attribute.HasField("t"):
            return f"has the attribute {attribute.name!r} without its tensor"
        if counts[attribute.name] > 1:
            return f"has the attribute {attribute.name!r} twice"
    return ""


def _arity_problem(node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> str:
    if not schema.min_input <= len(node.input) <= schema.max_input:
        return f"has {len(node.input)} inputs and takes {_range(schema)}"
    for formal, name in zip(schema.inputs, node.input, strict=False):
        if formal.option == _SINGLE and not name:
            return f"lacks its input {formal.name!r}"
    if len(node.output) > schema.max_output or not any(node.output):
        return f"has {len(node.output)} outputs and gives 1 to {schema.max_output}"
    for formal, name in zip(schema.outputs, node.output, strict=False):
        if formal.option == _SINGLE and not name:
            return f"lacks its output {formal.name!r}"
    return ""


def _kind_problem(node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> str:
    given = {attribute.name: attribute for attribute in node.attribute}
    for name, described in schema.attributes.items():
        attribute = given.get(name)
        if attribute is None:
            if described.required:
                return f"lacks its attribute {name!r}"
        elif _KINDS[attribute.type] != described.type:
            return f"has the attribute {name!r} of the wrong kind"
        elif not _is_sensible(name, attribute.i):
            return f"has the attribute {name!r} = {attribute.i}"
    return ""


def _range(schema: onnx.defs.OpSchema) -> str:
    least, most = schema.min_input, schema.max_input
    return str(least) if least == most else f"{least} to {most}"


def _is_sensible(name: str, value: int) -> bool:
    if name in _FLAGS:
        return value in (0, 1)
    return name in _WIDE or abs(value) <= _LARGEST_INT


def _branch_problem(node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> str:
    branches = [a for a in node.attribute if a.name.endswith("_branch")]
    for branch in branches if schema.name == "If" else ():
        if len(branch.g.output) != len(node.output):
            return f"has {len(node.output)} outputs and a {branch.name} with another number"
    return ""


def _window_problem(node: onnx.NodeProto, _: onnx.defs.OpSchema) -> str:
    for attribute in node.attribute:
        if attribute.name == "kernel_shape":
            window = list(attribute.ints)
            if min(window, default=1) < 1 or math.prod(window) > limits.MAX_WINDOW:
                return f"has a window of {limits.describe(window)} elements"
    return ""


@cache
def _schema(op_type: str, version: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:
        return None
