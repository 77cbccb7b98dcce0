"""Damage to a model file: of its bytes, and of what the bytes mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import onnx
from google.protobuf.message import Message
from hostile_nodes import (
    Rng,
    attribute_form,
    attribute_value,
    cycle,
    domain,
    node_input,
    node_of,
    node_output,
    nodes,
    op_type,
    opset,
    pick,
    reshaping,
)
from hostile_values import (
    external,
    names,
    sparse,
    tensor_data,
    tensor_shape,
    tensor_type,
    value_shape,
    value_type,
)
from onnx import TensorProto, helper

Edit = Callable[[onnx.ModelProto, Rng], None]


def fewer(model: onnx.ModelProto, rng: Rng) -> None:
    """No inputs, no outputs, no weights, or no graph."""
    name = pick(rng, ("input", "output", "initializer", "node"))
    if rng.random() < 0.1:
        model.ClearField("graph")
    else:
        model.graph.ClearField(name)


def nesting(model: onnx.ModelProto, rng: Rng) -> None:
    """The whole graph inside an If, inside an If, and so on."""
    if any(node.op_type == "If" for node in model.graph.node):
        return  # protobuf's tools write no more than 100 messages in each other
    for _ in range(pick(rng, (1, 2, 10, 28))):
        inner = onnx.GraphProto()
        inner.CopyFrom(model.graph)
        del inner.input[:]
        del model.graph.node[:]
        outputs = [out.name for out in model.graph.output]
        condition = pick(rng, ("cond", "x"))
        branches = {"then_branch": inner}
        if inner.ByteSize() < 100_000 and rng.random() < 0.5:
            branches["else_branch"] = inner
        model.graph.node.append(helper.make_node("If", [condition], outputs, **branches))
    model.graph.initializer.append(helper.make_tensor("cond", TensorProto.BOOL, [], [True]))


def functions(model: onnx.ModelProto, rng: Rng) -> None:
    """Functions that call themselves, each other, or each other twice, sixty deep."""
    depth = pick(rng, (1, 2, 60))
    twice = rng.random() < 0.7
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    closed = rng.random() < 0.5
    for level in range(depth):
        last = level == depth - 1
        callee = "deep0" if closed and last else f"deep{level + 1}"
        calls = [helper.make_node(callee, ["a"], ["b"], domain="own")]
        if last and not closed:
            calls = [helper.make_node("Relu", ["a"], ["b"])]
        second = calls[0].op_type if twice else "Identity"
        calls.append(
            helper.make_node(second, ["b"], ["c"], domain=calls[0].domain if twice else "")
        )
        made = helper.make_function("own", f"deep{level}", ["a"], ["c"], calls, opsets)
        model.functions.append(made)
    if not any(o.domain == "own" for o in model.opset_import):
        model.opset_import.add(domain="own", version=1)
    node = node_of(model, rng)
    if node.input:
        call = helper.make_node("deep0", [node.input[0]], ["called"], domain="own")
        model.graph.node.insert(0, call)
        node.input[0] = "called"


def any_field(model: onnx.ModelProto, rng: Rng) -> None:
    """Clear one field somewhere, whatever it is."""
    part: Message = model
    for _ in range(int(rng.integers(1, 7))):
        found = part.ListFields()
        if not found:
            return
        field, value = pick(rng, found)
        repeated = not hasattr(value, "DESCRIPTOR") and hasattr(value, "add") and len(value)
        if field.message_type is None or rng.random() < 0.2:
            part.ClearField(field.name)
            return
        part = pick(rng, value) if repeated else value
        if not isinstance(part, Message):
            return


EDITS: Final[Mapping[str, Edit]] = {
    edit.__name__: edit
    for edit in (
        any_field,
        attribute_form,
        attribute_value,
        cycle,
        domain,
        external,
        fewer,
        functions,
        names,
        nesting,
        node_input,
        node_output,
        nodes,
        op_type,
        opset,
        reshaping,
        sparse,
        tensor_data,
        tensor_shape,
        tensor_type,
        value_shape,
        value_type,
    )
}


# What leaves a file well formed more often, and so reaches further.
_SUBTLE: Final = (
    "attribute_value",
    "nodes",
    "op_type",
    "reshaping",
    "tensor_data",
    "tensor_shape",
    "value_shape",
)


def too_deep(data: bytes, levels: int) -> bytes:
    """A file like `data` with so many graphs in each other; protobuf stops at 100."""
    graph = onnx.ModelProto.FromString(data).graph.SerializeToString()
    for _ in range(levels):
        branch = _field(1, b"then_branch") + _field(6, graph) + b"\xa0\x01\x05"
        graph = _field(1, _field(1, b"c") + _field(4, b"If") + _field(5, branch))
    return data + _field(7, graph)


def _field(number: int, payload: bytes) -> bytes:
    """A field of protobuf's wire format that has a length."""
    size, head = len(payload), bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes([*head, size]) + payload


def damaged_bytes(data: bytes, other: bytes, rng: Rng) -> tuple[str, bytes]:
    """Flip bits, cut, take out, repeat, overwrite, or splice with another file."""
    kind = pick(rng, ("flip", "cut", "remove", "repeat", "overwrite", "splice", "deep"))
    start, stop = sorted(int(i) for i in rng.integers(0, len(data) + 1, 2))
    stop = min(stop, start + int(rng.integers(1, 65)))
    match kind:
        case "flip":
            changed = bytearray(data)
            # Most of a file is weights; what gives it its form is near the ends or short.
            for _ in range(int(rng.integers(1, 9))):
                changed[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
            return kind, bytes(changed)
        case "cut":
            return kind, data[:start]
        case "remove":
            return kind, data[:start] + data[stop:]
        case "repeat":
            return kind, data[:stop] + data[start:]
        case "overwrite":
            return kind, data[:start] + rng.bytes(stop - start) + data[stop:]
        case "deep":
            return kind, too_deep(data, pick(rng, (40, 200, 2000)))
        case _:
            return kind, data[:start] + other[int(rng.integers(len(other))) :]


def damaged_model(data: bytes, rng: Rng) -> tuple[str, bytes]:
    """One to three edits of what the file says."""
    model = onnx.ModelProto.FromString(data)
    done = []
    for _ in range(pick(rng, (1, 1, 1, 2, 3))):
        name = pick(rng, (*EDITS, *_SUBTLE, *_SUBTLE))
        EDITS[name](model, rng)
        done.append(name)
    return "+".join(done), model.SerializeToString()
