"""How much arithmetic a node does, and how many bytes it moves, from its shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from edgetrain.compiler.build import Node
from edgetrain.op_groups import Amount, OpGroup
from edgetrain.tensors import TensorSpec

Values = Mapping[str, TensorSpec]
MOVES_ONLY: Final = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Constant", "Shape"}
)
BLOCK: Final = (
    16  # channels: what engines have kernels of their own for comes in whole ones
)
_OPERATORS: Final[Mapping[OpGroup, str]] = {
    OpGroup.DENSE: "MatMul Gemm Einsum",
    OpGroup.RECURRENT: "LSTM GRU RNN",
    OpGroup.NORMALIZATION: (
        "BatchNormalization LayerNormalization InstanceNormalization GroupNormalization"
        " MeanVarianceNormalization LpNormalization LRN"
    ),
    OpGroup.POOLING: "MaxPool AveragePool LpPool MaxUnpool",
    OpGroup.REDUCTION: (
        "GlobalMaxPool GlobalAveragePool GlobalLpPool ReduceSum ReduceMean ReduceMax"
        " ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum"
        " ReduceLogSumExp ArgMax ArgMin TopK CumSum"
    ),
    OpGroup.LAYOUT: (
        "Reshape Flatten Squeeze Unsqueeze Identity Constant Shape"
        " Transpose Concat Split Slice Gather GatherElements GatherND ScatterElements"
        " ScatterND Expand Tile Pad DepthToSpace SpaceToDepth Resize Upsample GridSample"
        " Cast OneHot Compress ReverseSequence Trilu Col2Im Dropout"
    ),
    OpGroup.TRANSCENDENTAL: (
        "Exp Log Erf Tanh Sigmoid Softmax LogSoftmax Gelu Pow Softplus Mish Sin Cos Tan"
        " Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Elu Selu Celu HardSwish"
        " SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss"
    ),
}
_COPYING: Final = frozenset((OpGroup.CONVOLUTION_PLAIN, OpGroup.DEPTHWISE_PLAIN))
FLOAT_BYTES: Final = 4
_GROUP_OF: Final = {op: group for group, ops in _OPERATORS.items() for op in ops.split()}


def op_group(node: Node, values: Values) -> OpGroup:
    """The rate that fits a node; what is not known counts as elementwise."""
    if node.op_type not in {"Conv", "ConvTranspose"}:
        return _GROUP_OF.get(node.op_type, OpGroup.ELEMENTWISE)
    features, inner, *kernel = values[node.inputs[1]].shape
    groups = node.get("group", 1)
    plain = node.op_type == "ConvTranspose" or features % BLOCK or len(kernel) != 2
    if groups > 1:
        plain = plain or inner > 1 or max(node.get("strides", [1])) > 1
        return OpGroup.DEPTHWISE_PLAIN if plain else OpGroup.DEPTHWISE
    if math.prod(kernel) == 1:
        return OpGroup.POINTWISE
    return OpGroup.CONVOLUTION_PLAIN if plain or inner % BLOCK else OpGroup.CONVOLUTION


def node_bytes(node: Node, values: Values) -> int:
    """Bytes of its inputs, weights among them, and outputs; 0 where nothing is moved."""
    if node.op_type in MOVES_ONLY:
        return 0
    names = filter(None, (*dict.fromkeys(node.inputs), *node.outputs))
    return sum(values[name].nbytes for name in names if name in values)


def node_amount(node: Node, values: Values) -> Amount:
    """Work of one run of the node; each step of a recurrent one counts as a node.

    A plain convolution is a matrix product of the image's windows, copied out: the bytes
    of that copy, written and read, are often the most.
    """
    group, flop = op_group(node, values), node_flop(node, values)
    nbytes, nodes = node_bytes(node, values), 1
    if group is OpGroup.RECURRENT:
        nodes = values[node.inputs[0]].shape[0]
    elif group in _COPYING:
        products = flop // 2 * node.get("group", 1)
        nbytes += 2 * FLOAT_BYTES * products // values[node.inputs[1]].shape[0]
    return Amount(flop, nbytes, nodes)


def node_flop(node: Node, values: Values) -> int:
    """Floating point operations of one run of the node; a multiply-add counts as two."""
    output = values.get(next(filter(None, node.outputs), ""))
    if output is None or node.op_type in MOVES_ONLY:
        return 0
    match node.op_type:
        case "Conv":
            return 2 * output.elements * math.prod(values[node.inputs[1]].shape[1:])
        case "ConvTranspose":
            weight = values[node.inputs[1]].shape
            return 2 * values[node.inputs[0]].elements * math.prod(weight[1:])
        case "MatMul":
            return 2 * output.elements * values[node.inputs[0]].shape[-1]
        case "Gemm":
            a = values[node.inputs[0]].shape
            return 2 * output.elements * (a[0] if node.get("transA", 0) else a[-1])
        case "LSTM" | "GRU" | "RNN":
            rows = math.prod(values[node.inputs[0]].shape[:2])
            return 2 * rows * sum(values[name].elements for name in node.inputs[1:3])
        case "MaxPool" | "AveragePool":
            return output.elements * math.prod(node.get("kernel_shape", [1]))
        case _:
            reads = sum(values[name].elements for name in node.inputs[:1] if name in values)
            return max(reads, output.elements)
