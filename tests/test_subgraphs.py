"""Nodes with a body: what they read of the graph around them, and Scan."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from edgetrain.compiler.build import GraphBuilder, Node, Subgraph, live_nodes
from edgetrain.compiler.rules.base import add_all
from edgetrain.compiler.rules.recurrent_scan import Course, Values, scan
from edgetrain.tensors import TensorSpec

STEPS, ROWS, WIDTH = 4, 2, 3
X = np.random.default_rng(0).normal(size=(STEPS * ROWS, WIDTH)).astype(np.float32)
START = np.full((ROWS, WIDTH), 10, np.float32)


def builder() -> GraphBuilder:
    arrays = {"x": X, "start": START, "factor": np.array(2, np.float32)}
    return GraphBuilder(
        {k: TensorSpec(k, "float32", v.shape) for k, v in arrays.items()}, {}
    )


def results(g: GraphBuilder, wanted: dict[str, tuple[int, ...]]) -> list[np.ndarray]:
    outputs = [TensorSpec(name, "float32", shape) for name, shape in wanted.items()]
    model = g.model([g.spec(k) for k in ("x", "start", "factor")], outputs, "scan")
    onnx.checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    feeds = {"x": X, "start": START, "factor": np.array(2, np.float32)}
    return session.run(list(wanted), feeds)


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("with_extra", [False, True])
def test_a_scan_is_a_loop_over_the_steps(from_end: bool, with_extra: bool) -> None:
    """The body reads a value of the graph around it, a constant and an extra sequence."""
    g = builder()
    doubled = g("Mul", "factor", g.constant(1.5, np.float32))

    def step(
        b: GraphBuilder, states: Values, parts: Values, extra: str | None
    ) -> tuple[Values, Values]:
        scaled = b("Mul", b("Add", parts[0], b.constant(0.25, np.float32)), doubled)
        new = add_all(b, states[0], scaled, extra)
        return (new or "",), (new or "", states[0], parts[0])

    course = Course(STEPS, ROWS, from_end, ("x",), "x" if with_extra else None)
    (last,), collected = scan(g, step, ("start",), course)
    shapes = dict.fromkeys(collected, X.shape)
    found = results(g, {last: START.shape, **shapes})

    sums, state, befores = np.empty_like(X), START, np.empty_like(X)
    for t in reversed(range(STEPS)) if from_end else range(STEPS):
        rows = slice(t * ROWS, (t + 1) * ROWS)
        befores[rows] = state
        state = state + (X[rows] + np.float32(0.25)) * 3 + (X[rows] if with_extra else 0)
        sums[rows] = state
    for value, expected in zip(found, (state, sums, befores, X), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_what_a_body_reads_keeps_its_makers_alive() -> None:
    g = builder()
    outside = g("Neg", "factor")
    dead = g("Abs", "factor")
    body = g.subgraph()
    inner = body("Mul", "own", outside)
    nested = Node("Loop", "deep", (), ("n",), {"body": Subgraph((), (), ("start",))})
    subgraph = Subgraph(("own",), (*body.nodes, nested), (inner, "x"))
    node = Node("Scan", "scan", ("x",), ("y",), {"body": subgraph, "num_scan_inputs": 1})
    assert subgraph.captured == (outside, "start", "x")
    assert node.reads == ("x", outside, "start")
    kept = live_nodes([*g.nodes, node], {"y"})
    assert [n.output for n in kept] == [outside, "y"]
    assert dead not in {name for n in kept for name in n.outputs}


def test_names_and_constants_are_shared_with_a_body() -> None:
    g = builder()
    body = g.subgraph()
    outer, inner = g("Neg", "x"), body("Neg", "x")
    assert outer != inner
    assert g("Abs", "x") not in (outer, inner)
    assert [len(g.nodes), len(body.nodes)] == [2, 1]
    assert body.ints(1, 2) == g.ints(1, 2)
    body.describe(inner, "float32", X.shape)
    assert g.shape(inner) == X.shape
