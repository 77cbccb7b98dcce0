"""Reading and emitting ONNX nodes with static shapes: what rules work on."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from edgetrain.compiler.program import IR_VERSION, OPSET
from edgetrain.compiler.values import value_info
from edgetrain.errors import GraphError
from edgetrain.tensors import TensorSpec

Array = npt.NDArray[Any]
# What a decoded attribute may hold: int, float, str, tensor, a list of these; a Subgraph.
Attribute = Any


@dataclass(frozen=True, slots=True)
class Node:
    """One ONNX node, decoded. An absent optional input or output is ``""``.

    `domain` is empty for ONNX's own operators.
    """

    op_type: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    domain: str = ""

    @property
    def output(self) -> str:
        return self.outputs[0]

    def input(self, index: int) -> str:
        """The input's name, or ``""`` when it is absent."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def get(self, attribute: str, default: Attribute) -> Attribute:
        return self.attributes.get(attribute, default)

    @property
    def reads(self) -> tuple[str, ...]:
        """Its inputs, and the values around it that its subgraphs use."""
        bodies = [a for a in self.attributes.values() if isinstance(a, Subgraph)]
        names = (*self.inputs, *(name for body in bodies for name in body.captured))
        return tuple(dict.fromkeys(filter(None, names)))

    @classmethod
    def from_proto(cls, proto: onnx.NodeProto) -> Node:
        attributes = {a.name: _attribute(a) for a in proto.attribute}
        name = proto.name or (proto.output[0] if proto.output else proto.op_type)
        return cls(proto.op_type, name, tuple(proto.input), tuple(proto.output), attributes)

    def to_proto(self) -> onnx.NodeProto:
        attributes = {
            key: value.to_proto(key) if isinstance(value, Subgraph) else value
            for key, value in self.attributes.items()
        }
        return helper.make_node(
            self.op_type,
            self.inputs,
            self.outputs,
            self.name,
            domain=self.domain,
            **attributes,
        )


@dataclass(frozen=True, slots=True)
class Subgraph:
    """What a control-flow node runs: an attribute of it.

    Its values have names of their own in the whole model, and it may use any value of the
    graphs around it by name. Types and shapes are left to the engine to infer, as ONNX
    allows inside a node.
    """

    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    @property
    def captured(self) -> tuple[str, ...]:
        """The values around it that it uses."""
        own = {*self.inputs, *(name for node in self.nodes for name in node.outputs)}
        read = (*(name for node in self.nodes for name in node.reads), *self.outputs)
        return tuple(dict.fromkeys(name for name in read if name not in own))

    def to_proto(self, name: str) -> onnx.GraphProto:
        inputs, outputs = (
            [helper.make_empty_tensor_value_info(value) for value in values]
            for values in (self.inputs, self.outputs)
        )
        nodes = [node.to_proto() for node in self.nodes]
        return helper.make_graph(nodes, name, inputs, outputs)


class GraphBuilder:
    """Appends nodes to a graph whose values all have a known type and static shape.

    Calling it emits a node and returns the name of its output::

        y = g("Relu", x)
        mean, variance = g.multi("Foo", x, outputs=2)

    The shape and type of primal values come from the program; those of emitted values are
    not tracked unless given by `describe`. An operator outside ONNX is written
    ``domain::Op``.

    Attributes:
        block: channels in a block of the engine's own layout; 0: portable graphs only.
        lean: of two forms of a rule the one with the smaller temporaries is wanted.
    """

    def __init__(
        self,
        values: Mapping[str, TensorSpec],
        constants: Mapping[str, Array],
        *,
        block: int = 0,
    ) -> None:
        self.block = block
        self.lean = False
        self.nodes: list[Node] = []
        self._makers: dict[str, Node] = {}
        self._values = dict(values)
        self._constants: dict[str, Array] = dict(constants)
        self._interned: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._numbers = itertools.count(1)

    def __call__(self, op_type: str, *inputs: str, **attributes: Attribute) -> str:
        return self.multi(op_type, *inputs, outputs=1, **attributes)[0]

    def multi(
        self, op_type: str, *inputs: str, outputs: int, **attributes: Attribute
    ) -> tuple[str, ...]:
        """Emit a node of several outputs."""
        domain, _, op_type = op_type.rpartition("::")
        name = self.new_name(op_type)
        names = tuple(name if i == 0 else f"{name}:{i}" for i in range(outputs))
        self.append(Node(op_type, name, inputs, names, attributes, domain))
        return names

    def new_name(self, stem: str) -> str:
        """A name that nothing else in the model has."""
        return f"et/{stem}_{next(self._numbers)}"

    def subgraph(self) -> GraphBuilder:
        """A builder for a node's subgraph: its nodes are apart, all else is shared."""
        inner = copy.copy(self)
        inner.nodes = []
        return inner

    def fork(self) -> GraphBuilder:
        """A builder that knows the same values and has emitted nothing."""
        return GraphBuilder(self._values, self._constants, block=self.block)

    def append(self, node: Node) -> None:
        """Take over a node as it is."""
        self.nodes.append(node)
        self._makers.update(dict.fromkeys(node.outputs, node))

    def maker(self, name: str) -> Node | None:
        """The node that gives a value; None for an input or a constant."""
        return self._makers.get(name)

    def constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> str:
        """A constant, made once for equal values."""
        array = np.asarray(value, dtype=dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._interned:
            name = f"et/const_{len(self._interned)}"
            self._interned[key] = name
            self.name_constant(name, array)
        return self._interned[key]

    def name_constant(self, name: str, value: Array) -> None:
        self._constants[name] = value
        self._values[name] = TensorSpec(name, value.dtype.name, value.shape)

    def ints(self, *values: int) -> str:
        """A 1-D int64 constant: shapes, axes, pads, starts and ends."""
        return self.constant(np.asarray(values, np.int64))

    def scalar(self, value: float, like: str) -> str:
        """A constant of rank 0 with the type of `like`."""
        return self.constant(value, np.dtype(self.dtype(like)))

    def describe(self, name: str, dtype: str, shape: Iterable[int]) -> None:
        """Record what an emitted value is, for rules that run on it."""
        self._values[name] = TensorSpec(name, dtype, tuple(shape))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._spec(name).shape

    def rank(self, name: str) -> int:
        return len(self._spec(name).shape)

    def dtype(self, name: str) -> str:
        return self._spec(name).dtype

    def knows(self, name: str) -> bool:
        return name in self._values

    def is_float(self, name: str) -> bool:
        return bool(name) and self._spec(name).is_float

    def is_constant(self, name: str) -> bool:
        return name in self._constants

    def value(self, name: str) -> Array:
        """The value of a constant.

        Raises:
            GraphError: it is computed at run time.
        """
        if name not in self._constants:
            raise GraphError(f"{name!r} must be a constant but is computed at run time")
        return self._constants[name]

    def spec(self, name: str) -> TensorSpec:
        """Type and shape of a known value."""
        return self._spec(name)

    def model(
        self,
        inputs: Iterable[TensorSpec],
        outputs: Iterable[TensorSpec],
        name: str,
        nodes: Iterable[Node] | None = None,
    ) -> onnx.ModelProto:
        """A model of the nodes that `outputs` depend on; unused constants are left out.

        Args:
            inputs: of the model, with their shapes.
            outputs: of the model, with their shapes.
            name: of the graph.
            nodes: where to look; all that were emitted unless given.
        """
        outputs = tuple(outputs)
        wanted = {o.name for o in outputs}
        nodes = live_nodes(self.nodes if nodes is None else nodes, wanted)
        used = {i for node in nodes for i in node.reads}
        graph = helper.make_graph(
            [node.to_proto() for node in nodes],
            name,
            [value_info(spec) for spec in inputs],
            [value_info(spec) for spec in outputs],
            [
                numpy_helper.from_array(value, constant)
                for constant, value in self._constants.items()
                if constant in used
            ],
        )
        return helper.make_model(
            graph,
            opset_imports=[
                helper.make_opsetid(domain, 1 if domain else OPSET)
                for domain in sorted({"", *(n.domain for n in nodes)})
            ],
            ir_version=IR_VERSION,
            producer_name="edgetrain",
        )

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._values:
            raise GraphError(f"the shape of {name!r} is not known")
        return self._values[name]


def live_nodes(nodes: Iterable[Node], wanted: set[str]) -> list[Node]:
    """The nodes that `wanted` values depend on, in their order."""
    wanted = set(wanted)
    kept = []
    for node in reversed(list(nodes)):
        if wanted.intersection(node.outputs):
            kept.append(node)
            wanted.update(node.reads)
    return kept[::-1]


def _attribute(proto: onnx.AttributeProto) -> Attribute:
    value = helper.get_attribute_value(proto)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if proto.type == onnx.AttributeProto.STRINGS:
        return [cast(bytes, item).decode("utf-8", "replace") for item in value]
    if isinstance(value, list) or hasattr(value, "extend"):
        return list(value)
    return value
