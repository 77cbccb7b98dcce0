"""Operators that our opset does not have, written out in ones that it has.

Most are functions by the standard's own definition, and that definition takes their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import onnx
from onnx import helper, inliner

from edgetrain.compiler import shapes
from edgetrain.compiler.build import Array
from edgetrain.compiler.fold import fold, fold_control_flow
from edgetrain.compiler.intake import opset, refuse_control_flow
from edgetrain.compiler.tidy import lift_constants, set_nodes, settle_casts, subgraphs
from edgetrain.errors import GraphError
from edgetrain.tensors import TensorSpec

Specs = Mapping[str, TensorSpec]
Rewrite = Callable[[onnx.NodeProto, Specs], list[onnx.NodeProto]]

# The opset from which on an operator is replaced by the standard's definition of it.
FUNCTIONS: Final[Mapping[str, int]] = {
    "AffineGrid": 20,
    "Attention": 23,
    "CausalConvWithState": 27,
    "CenterCropPad": 18,
    "GroupNormalization": 21,
    "RMSNormalization": 23,
    "RotaryEmbedding": 23,
    "SwiGLU": 28,
    "Swish": 24,
}


def decompose(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> onnx.ModelProto:
    """A model without the operators that the version converter cannot take to our opset.

    Args:
        model: static input shapes, no functions and no control flow.
        feeds: value of every input, to measure shapes that inference leaves open.

    Returns:
        A model of the same opset; the input itself where nothing has to be done.

    Raises:
        GraphError: a definition does not fit how its operator is used, or a shape that
            matters is not static.
    """
    version = opset(model)
    present = {node.op_type for node in model.graph.node}
    functions = [op for op, since in FUNCTIONS.items() if version >= since]
    if not present.isdisjoint(functions):
        # All are named, as one definition may read another: SwiGLU reads Swish.
        model = _straightened(_inlined(shapes.infer(model), functions))
    rewrites = {op: f for op, (since, f) in REWRITES.items() if version >= since}
    return model if present.isdisjoint(rewrites) else _rewritten(model, feeds, rewrites)


def _rewritten(
    model: onnx.ModelProto, feeds: Mapping[str, Array], rewrites: Mapping[str, Rewrite]
) -> onnx.ModelProto:
    fold(model, feeds)
    model = shapes.complete(model, feeds)
    specs = shapes.known(model)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        rewrite = rewrites.get(node.op_type)
        nodes.extend(rewrite(node, specs) if rewrite else [node])
    set_nodes(model.graph, nodes)
    return model


def _inlined(model: onnx.ModelProto, functions: list[str]) -> onnx.ModelProto:
    # The inliner asks for the type of every input: of constants, which inference leaves
    # out, and of absent ones, which are called "".
    absent = helper.make_tensor_value_info("", onnx.TensorProto.FLOAT, None)
    held = [
        helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        for t in model.graph.initializer
    ]
    model.graph.value_info.extend([absent, *held])
    for node in model.graph.node:
        if node.op_type in functions:
            _spell_out(node, opset(model))
    names = [("", op) for op in functions]
    present = sorted({node.op_type for node in model.graph.node}.intersection(functions))
    try:
        model = inliner.inline_selected_functions(
            model, names, inline_schema_functions=True
        )
    except RuntimeError as error:
        raise GraphError(
            f"{', '.join(present)} cannot be written out in older operators: {error};"
            " export the model with opset_version=20"
        ) from error
    del model.graph.value_info[:]
    return model


def _straightened(model: onnx.ModelProto) -> onnx.ModelProto:
    """Put the taken branch in place of every If that a definition has."""
    if any(any(subgraphs(node)) for node in model.graph.node):
        model = shapes.infer(model)
        settle_casts(model.graph)
        fold_control_flow(model, lambda: lift_constants(model.graph))
        refuse_control_flow(model.graph)
    return model


def _spell_out(node: onnx.NodeProto, version: int) -> None:
    """Write defaults down; inlining does not hand them on to functions inside functions."""
    given = {attribute.name for attribute in node.attribute}
    schema = onnx.defs.get_schema(node.op_type, version, "")
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.name:
            node.attribute.append(attribute.default_value)


def _global_max_pool(node: onnx.NodeProto, specs: Specs) -> list[onnx.NodeProto]:
    """One window over the whole image; the converter has no way down from opset 22."""
    image = list(specs[node.input[0]].shape[2:])
    return [
        helper.make_node("MaxPool", node.input, node.output, node.name, kernel_shape=image)
    ]


def _float_mod(node: onnx.NodeProto, specs: Specs) -> list[onnx.NodeProto]:
    """a - b * floor(a / b), which has the sign of b, for floats without `fmod`."""
    truncates = any(a.name == "fmod" and a.i for a in node.attribute)
    if truncates or not specs[node.input[0]].is_float:
        return [node]
    a, b = node.input
    parts = {op: f"{node.output[0]}/{op}" for op in ("Div", "Floor", "Mul")}
    return [
        helper.make_node("Div", [a, b], [parts["Div"]]),
        helper.make_node("Floor", [parts["Div"]], [parts["Floor"]]),
        helper.make_node("Mul", [b, parts["Floor"]], [parts["Mul"]]),
        helper.make_node("Sub", [a, parts["Mul"]], node.output, node.name),
    ]


REWRITES: Final[Mapping[str, tuple[int, Rewrite]]] = {
    "GlobalMaxPool": (22, _global_max_pool),
    "Mod": (28, _float_mod),
}
