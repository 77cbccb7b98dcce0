"""Where a model file keeps its tensors: finding, reading and replacing them in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from edgetrain.compiler.program import WeightSource
from edgetrain.compiler.tidy import constant_tensor, fill_value, subgraphs

Array = npt.NDArray[Any]

_MAKERS: Final = frozenset({"Constant", "ConstantOfShape", "Identity"})


@dataclass(frozen=True, slots=True)
class Site:
    """A floating-point tensor of the file.

    Attributes:
        source: its kind, name and type.
        tensor: the initializer, or the value of a Constant node; None when a node makes
            the tensor of something else.
        node: the node that makes it; None for an initializer.
    """

    source: WeightSource
    tensor: TensorProto | None = None
    node: onnx.NodeProto | None = None

    @property
    def alias_of(self) -> str:
        """The value an Identity node repeats, or ``""``."""
        if self.node is not None and self.node.op_type == "Identity":
            return str(self.node.input[0])
        return ""


def find(model: onnx.ModelProto) -> dict[str, Site]:
    """Every float tensor the file holds or makes of nothing, by its name.

    A name that several subgraphs use for different tensors is left out, as it does not
    say which one is meant.
    """
    entries = list(_entries(model.graph))
    counts = Counter(site.source.name for site in entries)
    sites: dict[str, Site] = {}
    for site in entries:
        name = site.source.name
        if counts[name] > 1:
            continue
        if not site.alias_of:
            sites[name] = site
        elif site.alias_of in sites:
            dtype = sites[site.alias_of].source.dtype
            sites[name] = Site(WeightSource("node", name, dtype), node=site.node)
    return sites


def _entries(graph: onnx.GraphProto) -> Iterator[Site]:
    for tensor in graph.initializer:
        if is_float(tensor.data_type):
            yield Site(WeightSource("initializer", tensor.name, dtype_name(tensor)), tensor)
    for node in graph.node:
        if node.op_type in _MAKERS and node.output:
            yield from _made(node)
        for inner in subgraphs(node):
            yield from _entries(inner)


def _made(node: onnx.NodeProto) -> Iterator[Site]:
    name = node.output[0]
    if node.op_type == "Identity":
        yield Site(WeightSource("node", name, ""), node=node)
        return
    tensor = fill_value(node) if node.op_type == "ConstantOfShape" else _constant(node)
    if tensor is not None and is_float(tensor.data_type):
        held = tensor if node.op_type == "Constant" else None
        yield Site(WeightSource("node", name, dtype_name(tensor)), held, node)


def _constant(node: onnx.NodeProto) -> TensorProto | None:
    attribute = node.attribute[0]
    return attribute.t if attribute.name == "value" else constant_tensor(node)


def is_float(data_type: int) -> bool:
    return data_type in _FLOATS


def dtype_name(tensor: TensorProto) -> str:
    """The type of its elements, as numpy (or ml_dtypes) names it."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).name


_FLOATS: Final = frozenset(
    {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16}
)
