"""Cotangents of parts that tile a value are joined, not padded and added."""

from __future__ import annotations

import numpy as np
import pytest

from edgetrain.compiler import reference
from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.joining import joined
from edgetrain.compiler.vjp import vjp
from edgetrain.tensors import TensorSpec

SHAPE = (2, 6, 3)


def gather(index):
    return lambda g: (("x", g.constant(index, "int64")), {"axis": 1}, "Gather")


def cut(start, stop):
    return lambda g: (("x", g.ints(start), g.ints(stop), g.ints(1)), {}, "Slice")


WHOLE = {
    "gathers": [gather([4, 5]), gather([0, 1, 2]), gather([3])],
    "scalars": [gather(i) for i in range(6)],
    "slices": [cut(0, 2), cut(2, 3), cut(3, 6)],
    "both": [cut(2, 6), gather([0, 1])],
}
BROKEN = {
    "overlap": [cut(0, 4), cut(3, 6)],
    "gap": [cut(0, 2), cut(3, 6)],
    "short": [cut(0, 2), cut(2, 5)],
    "shuffled": [gather([1, 0, 2]), cut(3, 6)],
}


def backward(parts):
    """The ops of the backward graph, and the cotangent of x it gives."""
    g = GraphBuilder({"x": TensorSpec("x", "float32", SHAPE)}, {})
    nodes, feeds, expected = [], {}, np.zeros(SHAPE, np.float32)
    for i, part in enumerate(parts):
        inputs, attributes, op = part(g)
        node = Node(op, f"n{i}", inputs, (f"y{i}",), attributes)
        x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
        proto = g.model([g.spec("x")], [TensorSpec(f"y{i}", "float32", ())], "f", [node])
        proto.graph.output[0].type.tensor_type.ClearField("shape")
        y = reference.run(proto, {"x": x})[f"y{i}"]
        dy = np.random.default_rng(i).standard_normal(y.shape).astype(np.float32)
        np.add.at(expected.reshape(-1), y.astype(int).ravel(), dy.ravel())
        g.describe(f"y{i}", "float32", y.shape)
        g.describe(f"dy{i}", "float32", y.shape)
        g.append(node)
        nodes.append(node)
        feeds[f"dy{i}"] = dy
    found = vjp(g, nodes, {f"y{i}": f"dy{i}" for i in range(len(parts))}, ["x"])
    specs = [g.spec(name) for name in feeds]
    output = TensorSpec(found["x"], "float32", SHAPE)
    model = g.model(specs, [output], "b", g.nodes[len(nodes) :])
    dx = reference.run(model, feeds)[found["x"]]
    np.testing.assert_allclose(dx, expected, rtol=1e-6)
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("name", WHOLE)
def test_parts_that_tile_a_value_are_joined(name):
    ops = backward(WHOLE[name])
    assert "Concat" in ops
    assert not {"Pad", "Add"} & set(ops)


@pytest.mark.parametrize("name", BROKEN)
def test_parts_that_do_not_tile_are_added(name):
    assert "Add" in backward(BROKEN[name])


def test_a_part_that_is_padded_with_something_else_is_not_joined():
    g = GraphBuilder({"x": TensorSpec("x", "float32", (4,))}, {})
    ones = g.scalar(1, "x")
    a = g("Pad", "a", g.ints(0, 2), ones)
    b = g("Pad", "b", g.ints(2, 0))
    assert joined(g, [a, b], (4,)) is None
    assert joined(g, [g("Pad", "a", g.ints(0, 2)), b], (4,)) is not None
