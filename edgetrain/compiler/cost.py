"""How much arithmetic a node does, from its shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from edgetrain.compiler.build import Node
from edgetrain.tensors import TensorSpec

Values = Mapping[str, TensorSpec]
MOVES_ONLY: Final = frozenset(
    {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Constant", "Shape"}
)


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
