"""How much memory the values of a graph take while it runs, told before it runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import onnx
from onnx import helper, numpy_helper, shape_inference

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.order import depth_first, relisted
from edgetrain.compiler.program import OPSET
from edgetrain.compiler.rules.blocked import DOMAIN
from edgetrain.compiler.shapes import is_static
from edgetrain.compiler.stash import VIEWS
from edgetrain.compiler.values import tensor_spec, value_info
from edgetrain.manifest import Port, Role
from edgetrain.tensors import TensorSpec

# Only shapes, axes and the like decide shapes; a larger constant is but its own shape.
SETTING_ELEMENTS: Final = 256


def peak_bytes(g: GraphBuilder, nodes: Sequence[Node], outputs: Iterable[Port]) -> int:
    """The most bytes that a graph's temporaries and outputs take at once in one run.

    Not counted are the graph's inputs, which whoever runs it holds in any case; constants;
    gradients, which are written to the flat buffer; and what kernels need inside, which is
    the engine's business. An engine that computes in place or puts one node in place of
    several needs less.

    Args:
        g: where the nodes were emitted; knows the graph's inputs.
        nodes: of the graph, as listed.
        outputs: of the graph.
    """
    outputs = tuple(outputs)
    graph = _inferred(g, nodes)
    infos = filter(is_static, (*graph.input, *graph.value_info))
    specs = {info.name: tensor_spec(info) for info in infos}
    sizes = {
        name: _nbytes(specs, name, node)
        for node in nodes
        for name in filter(None, node.outputs)
    }
    sizes |= {port.name: 0 for port in outputs if port.role is Role.GRADIENT}
    inner = {
        proto.output[0]: sum(map(_inner_bytes, proto.attribute)) for proto in graph.node
    }
    kept = {port.name for port in outputs}
    orders = (depth_first(nodes), depth_first(relisted(nodes, kept)))
    return max(live_peak(order, sizes, kept, inner) for order in orders)


def live_peak(
    nodes: Sequence[Node],
    sizes: Mapping[str, int],
    kept: Collection[str],
    inner: Mapping[str, int],
) -> int:
    """The most bytes alive at once while nodes run in the order given.

    A value takes its bytes from when it is made until the last node that reads it, or a
    view of it, is done; to the end if it is kept or if nothing reads it. A view that is
    kept is a copy.

    Args:
        nodes: in execution order.
        sizes: bytes of what they make; of anything else, nothing counts.
        kept: values that stay.
        inner: what a node needs while it runs, by its first output.

    Time and memory O(nodes and their inputs).
    """
    owner: dict[str, str] = {}
    last: dict[str, int] = {}
    for index, node in enumerate(nodes):
        last |= {owner[name]: index for name in node.reads if name in owner}
        for name in filter(None, node.outputs):
            shares = _is_view(node) and name not in kept
            owner[name] = owner.get(node.inputs[0], node.inputs[0]) if shares else name
    stay = {owner[name] for name in kept if name in owner}
    alive = most = 0
    ends: Counter[int] = Counter()
    for index, node in enumerate(nodes):
        for name in (n for n in node.outputs if owner.get(n) == n):
            alive += sizes[name]
            if name in last and name not in stay:
                ends[last[name]] += sizes[name]
        most = max(most, alive + inner.get(node.output, 0))
        alive -= ends[index]
    return most


def _is_view(node: Node) -> bool:
    return node.op_type in VIEWS and not node.domain


def _nbytes(specs: Mapping[str, TensorSpec], name: str, node: Node) -> int:
    """Of a value; where its shape is not known, of all that its node reads."""
    names = (name,) if name in specs else node.reads
    return sum(specs[n].nbytes for n in names if n in specs)


def _inferred(g: GraphBuilder, nodes: Sequence[Node]) -> onnx.GraphProto:
    """The nodes as a graph with the shapes of its values, as far as ONNX can tell."""
    made = {name for node in nodes for name in node.outputs}
    read = list(dict.fromkeys(name for node in nodes for name in node.reads))
    settings = [n for n in read if g.is_constant(n) and g.value(n).size <= SETTING_ELEMENTS]
    outer = [n for n in read if n not in made and n not in settings]
    graph = helper.make_graph(
        [_in_onnx(node).to_proto() for node in nodes],
        "live",
        [value_info(g.spec(name)) for name in outer],
        [],
        [numpy_helper.from_array(g.value(name), name) for name in settings],
        value_info=[value_info(g.spec(name)) for name in made if g.knows(name)],
    )
    opset = helper.make_opsetid("", OPSET)
    model = helper.make_model(graph, opset_imports=[opset])
    try:
        return shape_inference.infer_shapes(model).graph
    except (shape_inference.InferenceError, RuntimeError):
        return graph


def _in_onnx(node: Node) -> Node:
    """A node that gives values of the same shapes, for ONNX's own inference."""
    if node.domain != DOMAIN:
        return node
    if node.op_type.startswith("Reorder"):
        return replace(node, op_type="Identity", attributes={}, domain="")
    return replace(node, domain="")


def _inner_bytes(attribute: onnx.AttributeProto) -> int:
    """Of all values of a subgraph in one turn, as if none of them were ever freed."""
    graph = attribute.g
    infos = {info.name: info for info in (*graph.value_info, *graph.output)}
    total = sum(map(_inner_bytes, (a for node in graph.node for a in node.attribute)))
    for info in infos.values():
        tensor = info.type.tensor_type
        dims = [max(dim.dim_value, 1) for dim in tensor.shape.dim]
        if tensor.elem_type:
            dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            total += math.prod(dims) * dtype.itemsize
    return total
