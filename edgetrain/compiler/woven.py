"""A graph that computes weights from the cores of their tensor trains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgetrain.compiler.tensor_train import PREFIX, Core, TensorTrain, contract
from edgetrain.compiler.values import value_info
from edgetrain.tensors import TensorSpec


def computed_from_cores(
    model: onnx.ModelProto, trains: Iterable[TensorTrain]
) -> onnx.ModelProto:
    """A copy that takes the cores in place of the weights, which keep their names.

    Args:
        model: in normal form.
        trains: of weights that are inputs of it.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    inputs = {info.name: [info] for info in graph.input}
    nodes = list(graph.node)
    del graph.input[:]
    del graph.node[:]
    for train in trains:
        inputs[train.weight] = [
            value_info(TensorSpec(name, "float32", shape))
            for name, shape in train.cores.items()
        ]
        _Weaver(graph, train).weave()
    graph.input.extend(info for infos in inputs.values() for info in infos)
    graph.node.extend(nodes)
    return copy


class _Product(NamedTuple):
    """A value of the graph that holds the elements of a core, in their order."""

    name: str
    shape: Core


class _Weaver:
    """Adds the nodes that compute one weight."""

    def __init__(self, graph: onnx.GraphProto, train: TensorTrain) -> None:
        self._graph = graph
        self._train = train
        self._count = 0

    def weave(self) -> None:
        parts = [_Product(name, shape) for name, shape in self._train.cores.items()]
        whole = contract(parts, self._join)
        self._reshape(whole.name, self._train.shape, self._train.weight)

    def _join(self, left: _Product, right: _Product) -> _Product:
        (p, m, n, q), (_, k, l, s) = left.shape, right.shape  # noqa: E741 - as in `merge`
        a = self._reshape(left.name, (p * m * n, q))
        b = self._reshape(right.name, (q, k * l * s))
        product = self._emit("MatMul", [a, b], (p * m * n, k * l * s))
        apart = self._reshape(product, (p * m, n, k, l * s))
        turned = self._emit("Transpose", [apart], (p * m, k, n, l * s), perm=[0, 2, 1, 3])
        return _Product(turned, (p, m * k, n * l, s))

    def _reshape(self, value: str, shape: tuple[int, ...], output: str = "") -> str:
        target = self._new_name("shape")
        self._graph.initializer.append(
            numpy_helper.from_array(np.asarray(shape, np.int64), target)
        )
        return self._emit("Reshape", [value, target], shape, output)

    def _emit(
        self,
        op_type: str,
        inputs: Sequence[str],
        shape: tuple[int, ...],
        output: str = "",
        perm: Sequence[int] | None = None,
    ) -> str:
        output = output or self._new_name(op_type)
        self._graph.node.append(
            helper.make_node(op_type, inputs, [output], output, perm=perm)
        )
        self._graph.value_info.append(value_info(TensorSpec(output, "float32", shape)))
        return output

    def _new_name(self, stem: str) -> str:
        self._count += 1
        return f"{PREFIX}{self._train.weight}/{stem}_{self._count}"
