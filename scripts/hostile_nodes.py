"""Damage to the nodes of a model.

Each edit takes a model, changes it in place, and draws what it does from the generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper

Rng = np.random.Generator

EXTENTS: Final = (-(2**63), -7, -1, 0, 1, 2, 3, 5, 64, 2**20, 2**31 - 1, 2**40, 2**62)
SHAPES: Final = (-1, 0, 1, 2, 1000, 2**31, 2**45)
FLOATS: Final = (0.0, -1.0, 1e-45, 1e38, float("inf"), float("nan"), 2.5)
_TEXTS: Final = (
    "",
    "NOTSET",
    "SAME_LOWER",
    "VALID",
    "../../etc",
    "\0",
    "é" * 9,
    "bilinear",
)
# The most inputs that each operator takes.
_ARITIES: Final[Mapping[str, int]] = {
    schema.name: schema.max_input
    for schema in sorted(onnx.defs.get_all_schemas(), key=lambda schema: schema.name)
}
_DOMAINS: Final = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "own", "ai.onnx.training")


def pick(rng: Rng, items: Any) -> Any:  # noqa: ANN401  whatever the sequence holds
    """One of the items; the last, empty choice is the caller's to avoid."""
    return items[int(rng.integers(len(items)))]


def nodes_of(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    nodes = [*model.graph.node, *(node for f in model.functions for node in f.node)]
    for node in nodes:
        nodes.extend(inner for a in node.attribute for inner in a.g.node)
    return nodes


def node_of(model: onnx.ModelProto, rng: Rng) -> onnx.NodeProto:
    return pick(rng, nodes_of(model)) if nodes_of(model) else model.graph.node.add()


def tensor_of(model: onnx.ModelProto, rng: Rng) -> TensorProto:
    """An initializer, or the tensor of an attribute."""
    held = [a.t for n in nodes_of(model) for a in n.attribute if a.HasField("t")]
    tensors = [*model.graph.initializer, *held]
    return pick(rng, tensors) if tensors else model.graph.initializer.add(name="t")


def info_of(model: onnx.ModelProto, rng: Rng) -> onnx.ValueInfoProto:
    infos = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    return pick(rng, infos) if infos else model.graph.input.add(name="x")


def name_of(model: onnx.ModelProto, rng: Rng) -> str:
    """The name of some value, or one that nothing has."""
    names = [name for node in nodes_of(model) for name in (*node.input, *node.output)]
    return pick(rng, [*names, "", "nowhere"])


def attribute_value(model: onnx.ModelProto, rng: Rng) -> None:
    node = node_of(model, rng)
    if not node.attribute:
        return
    attribute = pick(rng, node.attribute)
    ints = [pick(rng, EXTENTS) for _ in range(rng.integers(0, 6))]
    match attribute.type:
        case AttributeProto.INT:
            attribute.i = pick(rng, EXTENTS)
        case AttributeProto.FLOAT:
            attribute.f = pick(rng, FLOATS)
        case AttributeProto.STRING:
            attribute.s = pick(rng, (*map(str.encode, _TEXTS), b"\xff\xfe"))
        case AttributeProto.INTS if len(attribute.ints) and rng.random() < 0.6:
            attribute.ints[int(rng.integers(len(attribute.ints)))] = pick(rng, EXTENTS)
        case _:
            attribute.ints[:] = ints


def attribute_form(model: onnx.ModelProto, rng: Rng) -> None:
    node = node_of(model, rng)
    match int(rng.integers(6)):
        case 0 if node.attribute:
            pick(rng, node.attribute).type = int(rng.integers(0, 15))
        case 1 if node.attribute:
            node.attribute.remove(pick(rng, node.attribute))
        case 2 if node.attribute:
            node.attribute.add().CopyFrom(pick(rng, node.attribute))
        case 3 if node.attribute:
            pick(rng, node.attribute).ref_attr_name = pick(rng, ("slope", "none"))
        case 4 if node.attribute:
            pick(rng, node.attribute).name = pick(
                rng, ("axis", "axes", "pads", "", "value")
            )
        case _:
            name = pick(
                rng, ("axis", "group", "perm", "auto_pad", "keepdims", "to", "body")
            )
            value = pick(rng, (-9, 2**40, [1, -1, 2**40], "SAME_LOWER", 0.5))
            node.attribute.append(helper.make_attribute(name, value))


def op_type(model: onnx.ModelProto, rng: Rng) -> None:
    node = node_of(model, rng)
    alike = [n for n, most in _ARITIES.items() if most == len(node.input)]
    ops = alike if alike and rng.random() < 0.8 else (*_ARITIES, "NoSuchOp", "")
    node.op_type = pick(rng, ops)


def domain(model: onnx.ModelProto, rng: Rng) -> None:
    node_of(model, rng).domain = pick(rng, _DOMAINS)


def opset(model: onnx.ModelProto, rng: Rng) -> None:
    versions = (0, -1, 1, 5, 6, 7, 8, 9, 10, 11, 12, 13, 17, 20, 21, 23, 25, 99, 2**40)
    if rng.random() < 0.2:
        del model.opset_import[:]
    elif rng.random() < 0.2 or not model.opset_import:
        model.opset_import.add(domain=pick(rng, _DOMAINS), version=pick(rng, versions))
    else:
        pick(rng, model.opset_import).version = pick(rng, versions)
    if rng.random() < 0.2:
        model.ir_version = pick(rng, (-1, 0, 1, 2, 3, 12, 99, 2**40))


def node_input(model: onnx.ModelProto, rng: Rng) -> None:
    node = node_of(model, rng)
    match int(rng.integers(4)):
        case 0 if node.input:
            del node.input[int(rng.integers(len(node.input))) :]
        case 1:
            node.input.extend(name_of(model, rng) for _ in range(rng.integers(1, 9)))
        case _ if node.input:
            node.input[int(rng.integers(len(node.input)))] = name_of(model, rng)


def node_output(model: onnx.ModelProto, rng: Rng) -> None:
    node = node_of(model, rng)
    match int(rng.integers(4)):
        case 0:
            del node.output[:]
        case 1:
            node.output.extend(f"extra{i}" for i in range(rng.integers(1, 5)))
        case _ if node.output:
            node.output[int(rng.integers(len(node.output)))] = name_of(model, rng)


def cycle(model: onnx.ModelProto, rng: Rng) -> None:
    """Some node reads what a later one makes."""
    node, later = node_of(model, rng), node_of(model, rng)
    if node.input and later.output:
        node.input[0] = later.output[0]


def nodes(model: onnx.ModelProto, rng: Rng) -> None:
    """Leave out, repeat, or shuffle."""
    kept = list(model.graph.node)
    match int(rng.integers(3)):
        case 0 if kept:
            del model.graph.node[int(rng.integers(len(kept)))]
        case 1 if kept:
            model.graph.node.add().CopyFrom(pick(rng, kept))
        case _:
            order = rng.permutation(len(kept))
            copies = [onnx.NodeProto.FromString(kept[i].SerializeToString()) for i in order]
            del model.graph.node[:]
            model.graph.node.extend(copies)


def reshaping(model: onnx.ModelProto, rng: Rng) -> None:
    """A node whose constant input makes its output huge, empty or impossible."""
    node = node_of(model, rng)
    if not node.input:
        return
    kind = pick(rng, ("Expand", "Tile", "Reshape", "Pad", "ConstantOfShape", "Range"))
    count = 8 if kind == "Pad" else int(rng.integers(1, 5))
    values = [pick(rng, SHAPES) for _ in range(count)]
    size = 3 if kind == "Range" else 1
    made = [f"absurd{i}" for i in range(size)]
    for name in made:
        dims = [] if kind == "Range" else [count]
        held = helper.make_tensor(
            name, TensorProto.INT64, dims, values[: 1 if not dims else count]
        )
        model.graph.initializer.append(held)
    source = (
        [node.input[0], *made] if kind in ("Expand", "Tile", "Reshape", "Pad") else made
    )
    model.graph.node.insert(0, helper.make_node(kind, source, ["reshaped"]))
    node.input[0] = "reshaped"
