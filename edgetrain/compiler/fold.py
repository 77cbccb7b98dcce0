"""Computing ahead what does not depend on data or weights, and moving to one opset."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper, version_converter
from onnxscript import optimizer

from edgetrain.compiler import reference, shapes
from edgetrain.compiler.agreement import RANDOM
from edgetrain.compiler.intake import opset
from edgetrain.compiler.program import OPSET
from edgetrain.compiler.tidy import (
    drop_dead,
    lift_constants,
    reads,
    set_nodes,
    sort_nodes,
    subgraphs,
)
from edgetrain.errors import GraphError
from edgetrain.tensors import TensorSpec

Array = npt.NDArray[Any]

# Elements; small enough to leave weights alone, large enough for shapes and conditions.
_CONDITION_ELEMENTS: Final = 64
_SHAPE_OPS: Final = frozenset({"Shape", "Size"})


def fold(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> None:
    """Replace all that is constant by initializers, in place, until nothing changes.

    Args:
        model: static input shapes, no control flow.
        feeds: value of every input, to measure shapes that inference leaves open.
    """
    graph = model.graph
    while True:
        before = len(graph.node)
        lift_constants(graph)
        _fold_shapes(graph, shapes.known(shapes.infer(model)))
        _fold_constants(model)
        drop_dead(graph)
        if len(graph.node) < before:
            continue
        if any(node.op_type in _SHAPE_OPS for node in graph.node):
            _fold_shapes(graph, shapes.known(shapes.complete(model, feeds)))
        if len(graph.node) == before:
            return


def fold_control_flow(model: onnx.ModelProto, lift_weights: Callable[[], None]) -> None:
    """Put the taken branch in place of each If whose condition is constant, in place.

    Conditions on shapes count as constant. What a branch brings into the graph may decide
    the next condition, and may hold weights.

    Args:
        model: static input shapes.
        lift_weights: makes inputs of the graph's weights, before anything is computed from
            them ahead of time.
    """
    before = (-1, -1)
    while (size := _size(model.graph)) != before and size[1]:
        before = size
        lift_weights()
        _fold_shapes(model.graph, shapes.known(shapes.infer(model)))
        _fold_constants(model)
        _fold_conditions(model)
        sort_nodes(model.graph)
    lift_weights()


def _fold_conditions(model: onnx.ModelProto) -> None:
    try:
        optimizer.fold_constants(
            model,
            input_size_limit=_CONDITION_ELEMENTS,
            output_size_limit=_CONDITION_ELEMENTS,
        )
    except RuntimeError as error:
        reason = str(error.__cause__ or error).strip().split("\n", 1)[0]
        raise GraphError(
            f"the model's control flow cannot be resolved: {reason}; export the model"
            " without Python branches or loops"
        ) from error


def _size(graph: onnx.GraphProto) -> tuple[int, int]:
    """How many nodes there are, and how many of them hold graphs."""
    return len(graph.node), sum(any(subgraphs(node)) for node in graph.node)


def convert(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model at opset 20.

    Raises:
        GraphError: an operator has no equivalent there.
    """
    version = opset(model)
    if version != OPSET and not _same_meaning(model.graph, version):
        try:
            model = version_converter.convert_version(model, OPSET)
        except (RuntimeError, version_converter.ConvertError) as error:
            reason = str(error).strip().split("\n", 1)[0].rpartition(" failed: ")[2]
            raise GraphError(
                f"the model cannot be moved from opset {version} to {OPSET}: {reason};"
                f" export it again with opset_version={OPSET}"
            ) from error
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", OPSET))
    return model


def _same_meaning(graph: onnx.GraphProto, version: int) -> bool:
    """Whether no operator of the graph changed between `version` and ours."""

    def since(op_type: str, at: int) -> int:
        try:
            return onnx.defs.get_schema(op_type, at, "").since_version
        except onnx.defs.SchemaError:
            return -1

    ops = {node.op_type for node in graph.node}
    return all(since(op, version) == since(op, OPSET) > 0 for op in ops)


def _fold_shapes(graph: onnx.GraphProto, specs: Mapping[str, TensorSpec]) -> None:
    outputs = {out.name for out in graph.output}
    kept = []
    for node in graph.node:
        foldable = node.op_type in _SHAPE_OPS and node.input[0] in specs
        if not foldable or node.output[0] in outputs:
            kept.append(node)
            continue
        shape = specs[node.input[0]].shape
        if node.op_type == "Size":
            value = np.asarray(math.prod(shape), np.int64)
        else:
            bounds = {a.name: a.i for a in node.attribute}
            part = shape[bounds.get("start", 0) : bounds.get("end")]
            value = np.asarray(part, np.int64)
        graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    set_nodes(graph, kept)


def _fold_constants(model: onnx.ModelProto) -> None:
    """Run, once, all nodes that read nothing but initializers."""
    graph = model.graph
    outputs = {out.name for out in graph.output}
    constant = {tensor.name for tensor in graph.initializer}
    ready, rest = [], []
    for node in graph.node:
        read = reads(node)
        pure = read and node.op_type not in RANDOM and constant.issuperset(read)
        if pure and not outputs.intersection(node.output):
            ready.append(node)
            constant.update(node.output)
        else:
            rest.append(node)
    if not ready:
        return
    made = {name for node in ready for name in node.output}
    wanted = sorted({name for node in rest for name in reads(node) if name in made})
    if wanted:
        values = reference.run(_constant_part(model, ready), {}, wanted)
        graph.initializer.extend(
            numpy_helper.from_array(values[name], name) for name in wanted
        )
    set_nodes(graph, rest)


def _constant_part(model: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    read = set(itertools.chain.from_iterable(node.input for node in nodes))
    tensors: list[TensorProto] = [t for t in model.graph.initializer if t.name in read]
    graph = helper.make_graph(nodes, "constants", [], [], tensors)
    return helper.make_model(
        graph, opset_imports=model.opset_import, ir_version=model.ir_version
    )
