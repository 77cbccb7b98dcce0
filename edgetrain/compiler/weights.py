"""Which float tensors of a model are weights, and making graph inputs of them.

As an input without value, a weight cannot be folded, fused, transposed or renamed by
any tool that later works on the graph, so its name stays the file's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgetrain.compiler.sites import is_float
from edgetrain.compiler.tidy import all_nodes, reads, set_initializers, set_nodes

Array = npt.NDArray[Any]
Use = tuple[str, int]

# Inputs that are weights whatever their size.
PARAMETERS: Final[Mapping[str, frozenset[int]]] = {
    "BatchNormalization": frozenset({1, 2, 3, 4}),
    "Conv": frozenset({1, 2}),
    "ConvTranspose": frozenset({1, 2}),
    "GRU": frozenset({1, 2, 3}),
    "Gather": frozenset({0}),
    "Gemm": frozenset({0, 1, 2}),
    "GroupNormalization": frozenset({1, 2}),
    "InstanceNormalization": frozenset({1, 2}),
    "LSTM": frozenset({1, 2, 3, 7}),
    "LayerNormalization": frozenset({1, 2}),
    "MatMul": frozenset({0, 1}),
    "PRelu": frozenset({1}),
    "RMSNormalization": frozenset({1}),
    "RNN": frozenset({1, 2, 3}),
}
# Inputs that are settings: their value shapes the graph or bounds it, and stays constant.
SETTINGS: Final[Mapping[str, frozenset[int]]] = {
    "Cast": frozenset({0}),
    "CastLike": frozenset({0, 1}),
    "Clip": frozenset({1, 2}),
    "ConstantOfShape": frozenset({0}),
    "DequantizeLinear": frozenset({0, 1}),
    "Dropout": frozenset({1}),
    "Equal": frozenset({0, 1}),
    "GRU": frozenset({5}),
    "Greater": frozenset({0, 1}),
    "GreaterOrEqual": frozenset({0, 1}),
    "LSTM": frozenset({5, 6}),
    "Less": frozenset({0, 1}),
    "LessOrEqual": frozenset({0, 1}),
    "Max": frozenset(range(8)),
    "Min": frozenset(range(8)),
    "NonMaxSuppression": frozenset({3, 4}),
    "OneHot": frozenset({2}),
    "Pad": frozenset({2}),
    "Pow": frozenset({1}),
    "QuantizeLinear": frozenset({1}),
    "RNN": frozenset({5}),
    "Range": frozenset({0, 1, 2}),
    "Resize": frozenset({1, 2}),
    "Upsample": frozenset({1}),
}
_LINEAR: Final = frozenset({"Conv", "ConvTranspose", "Einsum", "MatMul"})
_BIAS: Final[Use] = ("bias of a linear op", 0)
# Additive attention masks hold values this large, trained weights do not.
_MASK_VALUE: Final = 1e6


def uses(graph: onnx.GraphProto) -> dict[str, list[Use]]:
    """The (op type, input index) pairs that read each value, also through an Identity.

    Nodes of subgraphs count too.
    """
    nodes = list(all_nodes(graph))
    linear = {n.output[0] for n in nodes if n.op_type in _LINEAR and n.output}
    found: dict[str, list[Use]] = defaultdict(list)
    for node in nodes:
        for index, name in enumerate(node.input):
            biases = node.op_type == "Add" and node.input[1 - index] in linear
            found[name].append(_BIAS if biases else (node.op_type, index))
    for node in reversed(nodes):
        if node.op_type == "Identity":
            found[node.input[0]] += found[node.output[0]]
    return found


def is_weight(value: Array, readers: Iterable[Use]) -> bool:
    """Whether a float tensor that is read so should train.

    Tensors of one element count only where the op says that they are parameters, a
    setting never does, and neither does a tensor that holds masking values.
    """
    readers = list(readers)
    if not readers or any(index in SETTINGS.get(op, ()) for op, index in readers):
        return False
    if not value.size or not np.all(np.abs(value) < _MASK_VALUE):
        return False
    if value.size > 1:
        return True
    return any(
        _is_parameter(op, index) and (value.ndim > 0 or (op, index) != _BIAS)
        for op, index in readers
    )


def unshare(graph: onnx.GraphProto, names: Iterable[str]) -> list[str]:
    """Give each Identity alias of a float initializer, if in `names`, its own tensor.

    Exporters merge parameters that have equal values, as those of fresh layers have, and
    keep the name of each in an Identity. A tensor that nothing but aliases reads lends
    itself to the first of them.

    Returns:
        The names of the aliases that became tensors, with `` (of SHARED)`` behind each.
    """
    tensors = {t.name: t for t in graph.initializer if is_float(t.data_type)}
    own = set(names) - {out.name for out in graph.output}
    direct: set[str] = set()
    for node in graph.node:
        if node.op_type != "Identity":
            direct |= reads(node)
    made: list[str] = []
    kept = []
    origin: dict[str, str] = {}
    for node in graph.node:
        root = origin.get(node.input[0], node.input[0]) if node.input else ""
        alias = node.output[0]
        if node.op_type != "Identity" or root not in tensors or alias not in own:
            kept.append(node)
            continue
        origin[alias] = root
        if alias not in direct:
            continue
        if root not in direct:
            direct.add(root)
            kept.append(node)
            continue
        copy = graph.initializer.add()
        copy.CopyFrom(tensors[root])
        copy.name = alias
        made.append(f"{alias} (of {root})")
    set_nodes(graph, kept)
    return made


def lift(graph: onnx.GraphProto, names: Iterable[str]) -> dict[str, Array]:
    """Turn the weights among the initializers called `names` into inputs without value.

    Returns:
        Their float32 values, in the order of the graph.
    """
    names = set(names)
    readers = uses(graph)
    lifted: dict[str, Array] = {}
    kept = []
    for tensor in graph.initializer:
        if tensor.name in names and tensor.data_type == TensorProto.FLOAT:
            value = numpy_helper.to_array(tensor)
            if is_weight(value, readers[tensor.name]):
                lifted[tensor.name] = np.array(value, np.float32)
                graph.input.append(
                    helper.make_tensor_value_info(
                        tensor.name, TensorProto.FLOAT, value.shape
                    )
                )
                continue
        kept.append(tensor)
    set_initializers(graph, kept)
    return lifted


def frozen(graph: onnx.GraphProto) -> list[str]:
    """The initializers that are weights by their use and yet stay constant."""
    readers = uses(graph)
    return [
        tensor.name
        for tensor in graph.initializer
        if is_float(tensor.data_type)
        and is_weight(numpy_helper.to_array(tensor), readers[tensor.name])
    ]


def tied(graph: onnx.GraphProto, names: Iterable[str]) -> list[str]:
    """The weights that several nodes read as a parameter, and so train as one."""
    readers = uses(graph)
    return [
        name
        for name in names
        if sum(_is_parameter(op, index) for op, index in readers[name]) > 1
    ]


def _is_parameter(op: str, index: int) -> bool:
    return (op, index) == _BIAS or index in PARAMETERS.get(op, ())
