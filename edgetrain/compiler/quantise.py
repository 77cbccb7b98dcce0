"""A forward as an integer engine runs it: its linear ops on values of 8 bits.

Every operand of a convolution or a product goes through QuantizeLinear and
DequantizeLinear, and what lies between is float, as in the files that integer engines
take. ONNX Runtime puts its integer kernels in place of such nodes by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from onnx import TensorProto

from edgetrain.compiler.build import Array, GraphBuilder, Node
from edgetrain.compiler.grids import LINEAR, Quantisation, activations, operands, scale_of
from edgetrain.compiler.rules.blocked import use_blocks
from edgetrain.errors import GraphError


def nodes_to_run(
    g: GraphBuilder, nodes: Sequence[Node], by: Quantisation | None
) -> list[Node]:
    """A stage's forward nodes as its engine runs them, quantised or in blocks."""
    return use_blocks(g, nodes) if by is None else quantise(g, nodes, by)


def quantise(
    g: GraphBuilder,
    nodes: Iterable[Node],
    by: Quantisation,
    keep: Collection[str] = (),
) -> list[Node]:
    """The same nodes with the operands of their linear ops quantised.

    Weights become signed bytes, symmetric about 0; activations unsigned bytes with a zero
    point; the bias of a convolution, or of a Gemm, 32 bits on the grid of its products.

    Args:
        g: takes the scales, and learns the shapes of the added values.
        nodes: in execution order; every value keeps its name.
        by: grids and ranges.
        keep: weights that stay as they are.

    Raises:
        GraphError: the range of an activation is not known.
    """
    return list(_Rewriting(g, by, frozenset(keep)).run(nodes))


class _Rewriting:
    """Emits nodes; a value is quantised once, where it is first read."""

    def __init__(self, g: GraphBuilder, by: Quantisation, keep: frozenset[str]) -> None:
        self._g = g
        self._by = by
        self._keep = keep
        self._restored: dict[str, str] = {}  # by value: what stands for it
        self._from_file: set[str] = set()  # quantised by the model itself

    def run(self, nodes: Iterable[Node]) -> Iterator[Node]:
        for node in nodes:
            if node.op_type == "DequantizeLinear":
                self._from_file.update(node.outputs)
            inputs = list(node.inputs)
            for index, name in enumerate(node.inputs):
                if name in self._by.grids and name not in self._keep:
                    yield from self._weight(name)
                    inputs[index] = self._restored[name]
            for index in operands(node):
                name = node.inputs[index]
                if self._is_activation(node, name):
                    yield from self._activation(name)
                    inputs[index] = self._restored[name]
            scales = self._bias_scales(node)
            if scales is not None:
                yield from self._bias(node.inputs[2], node.output, scales)
                inputs[2] = f"et/{node.output}/bias"
            yield replace(node, inputs=tuple(inputs))

    def _is_activation(self, node: Node, name: str) -> bool:
        ours = name in activations(node, self._by.fixed) and name not in self._from_file
        return ours and self._g.dtype(name) == "float32"

    def _weight(self, name: str) -> Iterator[Node]:
        if name not in self._restored:
            grid = self._by.grids[name]
            scales = np.asarray(grid.scales, np.float32)
            axis = {"axis": grid.axis} if scales.size > 1 else {}
            scales = scales if axis else scales[0]
            yield from self._pair(name, scales, np.zeros(scales.shape, np.int8), axis)

    def _activation(self, name: str) -> Iterator[Node]:
        if name not in self._restored:
            if name not in self._by.ranges:
                raise GraphError(f"no range is known of {name!r}, which is to be quantised")
            yield from self._pair(name, *scale_of(self._by.ranges[name]), {})

    def _pair(
        self, name: str, scale: Array, zero: Array, attributes: Mapping[str, int]
    ) -> Iterator[Node]:
        scale_name, zero_name, whole, restored = (
            f"et/{name}/{word}" for word in ("scale", "zero", "whole", "restored")
        )
        self._g.name_constant(scale_name, scale)
        self._g.name_constant(zero_name, zero)
        self._g.describe(whole, zero.dtype.name, self._g.shape(name))
        self._g.describe(restored, "float32", self._g.shape(name))
        self._restored[name] = restored
        for op_type, source, target in (
            ("QuantizeLinear", name, whole),
            ("DequantizeLinear", whole, restored),
        ):
            inputs = (source, scale_name, zero_name)
            yield Node(op_type, target, inputs, (target,), attributes)

    def _bias_scales(self, node: Node) -> Array | None:
        """The product of the operands' scales, a number or one a channel; None: stay."""
        bias, weight = node.input(2), node.input(1)
        plain = node.get("alpha", 1.0) == node.get("beta", 1.0) == 1.0
        if not bias or node.op_type not in LINEAR or not plain:
            return None
        known = self._is_activation(node, node.inputs[0]) and bias in self._by.fixed
        if not known or weight not in self._by.grids or weight in self._keep:
            return None
        scales = np.asarray(self._by.grids[weight].scales, np.float32)
        if scales.size > 1 and self._g.shape(bias) != scales.shape:
            return None
        scales = scales if scales.size > 1 else scales[0]
        return np.asarray(scale_of(self._by.ranges[node.inputs[0]])[0] * scales)

    def _bias(self, name: str, output: str, scales: Array) -> Iterator[Node]:
        """Written out, as QuantizeLinear gives no 32 bits."""
        stem, shape = f"et/{output}/bias", self._g.shape(name)
        self._g.name_constant(f"{stem}/scale", scales)
        for word, dtype in (
            ("/ratio", "float32"),
            ("/round", "float32"),
            ("/whole", "int32"),
            ("", "float32"),
        ):
            self._g.describe(stem + word, dtype, shape)
        axis = {"axis": 0} if scales.ndim else {}
        for op_type, inputs, target, attributes in (
            ("Div", (name, f"{stem}/scale"), f"{stem}/ratio", {}),
            ("Round", (f"{stem}/ratio",), f"{stem}/round", {}),
            ("Cast", (f"{stem}/round",), f"{stem}/whole", {"to": TensorProto.INT32}),
            ("DequantizeLinear", (f"{stem}/whole", f"{stem}/scale"), stem, axis),
        ):
            yield Node(op_type, target, inputs, (target,), attributes)
