"""Rules at their hard spots: ties, cancellation, and any geometry."""

from __future__ import annotations

import itertools

import numpy as np
import onnxruntime as ort
import pytest
from forward_graph import Graph, node, normal
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgetrain.compiler.build import GraphBuilder, live_nodes
from edgetrain.compiler.jvp import jvp
from edgetrain.compiler.rules.shaping import sum_to
from edgetrain.compiler.vjp import vjp
from edgetrain.tensors import TensorSpec


@pytest.mark.parametrize("flat", [0.0, 1.0])
@pytest.mark.parametrize(("kernel", "stride", "size"), [(2, 2, 6), (3, 3, 6), (3, 2, 7)])
def test_of_tied_maxima_the_first_takes_the_cotangent(
    flat: float, kernel: int, stride: int, size: int
) -> None:
    """A flat background ties whole windows; PyTorch sends the cotangent to the first."""
    x = np.full((2, 3, size, size), flat, np.float32)
    x[1] += np.random.default_rng(0).integers(0, 3, x[1].shape)
    pool = node("MaxPool", "x", "y", kernel_shape=[kernel] * 2, strides=[stride] * 2)
    graph = Graph([pool], {"x": x})
    dy = normal(*graph.g.shape("y"))
    back = vjp(graph.g, graph.nodes, {"y": graph.seed("y", dy)}, ["x"])
    expected = np.zeros_like(x)
    for n, c, i, j in itertools.product(*map(range, dy.shape)):
        rows, columns = i * stride, j * stride
        tile = x[n, c, rows : rows + kernel, columns : columns + kernel]
        p, q = np.unravel_index(tile.argmax(), tile.shape)
        expected[n, c, rows + p, columns + q] += dy[n, c, i, j]
    np.testing.assert_allclose(graph.run(back)["x"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_batch_normalisation_keeps_its_accuracy_far_from_zero(offset: float) -> None:
    x, s = normal(4, 3, 5, 5) + np.float32(offset), normal(3, seed=1)
    inputs = {"x": x, "s": s, "b": normal(3), "m": np.zeros(3, np.float32)}
    inputs["v"] = np.ones(3, np.float32)
    batch = node(
        "BatchNormalization", "x s b m v", "y mean var", training_mode=1, momentum=0.0
    )
    graph = Graph([batch], inputs)
    dy = normal(4, 3, 5, 5, seed=2)
    # Read as outputs too: the kernel would write unread statistics over its inputs.
    wanted = vjp(graph.g, graph.nodes, {"y": graph.seed("y", dy)}, ["x", "s", "b"])
    found = graph.run(wanted | {"mean": "mean", "var": "var"})

    axes = (0, 2, 3)
    exact, slope = x.astype(np.float64), dy.astype(np.float64)
    inv_std = 1 / np.sqrt(exact.var(axes, keepdims=True) + 1e-5)
    xhat = (exact - exact.mean(axes, keepdims=True)) * inv_std
    along = (slope * xhat).mean(axes, keepdims=True)
    inner = slope - slope.mean(axes, keepdims=True) - xhat * along
    expected = {
        "x": s[:, None, None] * inv_std * inner,
        "s": (slope * xhat).sum(axes),
        "b": slope.sum(axes),
    }
    for name, value in expected.items():
        error = np.abs(found[name] - value).max() / np.abs(value).max()
        assert error < 1e-5, name


POOL = {"kernel_shape": [2, 2], "strides": [2, 2]}
FORMULATIONS = {
    "tiling pool": (node("MaxPool", "x", "y", **POOL), {"ScatterElements", "Where"}),
    "point": (node("Conv", "x w1", "y"), {"ConvTranspose", "Slice"}),
    "depthwise": (node("Conv", "x wd", "y", group=12), {"MatMul"}),
    "relu": (node("Relu", "x", "y"), {"Where"}),
    "clip": (node("Clip", "x zero six", "y"), {"Where"}),
    "where": (node("Where", "chosen x one", "y"), {"Where"}),
}


@pytest.mark.parametrize("name", FORMULATIONS)
def test_slow_kernels_are_avoided(name: str) -> None:
    """These were measured at 2 to 50 times the cost of what is emitted instead."""
    forward, avoided = FORMULATIONS[name]
    inputs = {
        "x": normal(2, 12, 6, 6),
        "w1": normal(5, 12, 1, 1),
        "wd": normal(12, 1, 3, 3),
    }
    constants = {
        "zero": np.float32(0), "six": np.float32(6), "one": np.float32(1),
        "chosen": np.ones((6, 6), bool),
    }  # fmt: skip
    graph = Graph([forward], inputs, {k: np.asarray(v) for k, v in constants.items()})
    before = len(graph.g.nodes)
    back = vjp(graph.g, graph.nodes, {"y": graph.seed("y")}, ["x", "w1", "wd"])
    emitted = live_nodes(graph.g.nodes[before:], set(back.values()))
    assert emitted
    assert avoided.isdisjoint(n.op_type for n in emitted)


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_sum_to_undoes_any_broadcast(data: st.DataObject) -> None:
    old = data.draw(st.lists(st.integers(1, 3), max_size=5))
    lead = data.draw(st.integers(0, len(old)))
    new = [data.draw(st.sampled_from([1, n])) for n in old[lead:]]
    x = np.arange(np.prod(old), dtype=np.float32).reshape(old)
    g = GraphBuilder({"x": TensorSpec("x", "float32", tuple(old))}, {})
    total = g("Identity", sum_to(g, "x", old, new))
    model = g.model([g.spec("x")], [TensorSpec(total, "float32", tuple(new))], "sum")
    found = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    kept = tuple(i + lead for i, n in enumerate(new) if n == 1)
    expected = x.sum(tuple(range(lead)), keepdims=False) if lead else x
    expected = expected.sum(tuple(i - lead for i in kept), keepdims=True)
    np.testing.assert_array_equal(found, expected)
    assert len([n for n in g.nodes if n.op_type == "ReduceSum"]) <= 2


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_slice_goes_back_where_it_came_from(data: st.DataObject) -> None:
    extent = data.draw(st.integers(1, 6))
    start, stop = (data.draw(st.integers(-9, 9)) for _ in range(2))
    step = data.draw(st.sampled_from([-3, -2, -1, 1, 2, 3]))
    x = np.zeros((2, extent), np.float32)
    reference = x[:, slice_of(start, stop, step, extent)]
    assume(reference.size)
    constants = {
        k: np.array([v]) for k, v in {"a": start, "b": stop, "c": 1, "d": step}.items()
    }
    graph = Graph([node("Slice", "x a b c d", "y")], {"x": x}, constants)
    dy = normal(*reference.shape)
    assert graph.g.shape("y") == reference.shape
    back = vjp(graph.g, graph.nodes, {"y": graph.seed("y", dy)}, ["x"])
    wanted = back if back["x"] != "seed/y" else {"x": graph.g("Identity", "seed/y")}
    expected = np.zeros_like(x)
    expected[:, slice_of(start, stop, step, extent)] = dy
    np.testing.assert_array_equal(graph.run(wanted)["x"], expected)


def slice_of(start: int, stop: int, step: int, extent: int) -> slice:
    """Numpy and ONNX agree on what a slice means, clamping included."""
    return (
        slice(*slice(start, stop, step).indices(extent))
        if step > 0
        else slice(start, stop, step)
    )


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_convolutions_of_any_geometry_have_transposed_modes(data: st.DataObject) -> None:
    small = st.integers(1, 3)
    kernel, strides, dilations = ([data.draw(small) for _ in range(2)] for _ in range(3))
    pads = [data.draw(st.integers(0, 2)) for _ in range(4)]
    image = [data.draw(st.integers(1, 7)) for _ in range(2)]
    groups = data.draw(st.sampled_from([1, 3]))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    assume(all(image[i] + pads[i] + pads[i + 2] >= reach[i] for i in range(2)))
    features = data.draw(st.sampled_from([3, 6]))
    conv = node(
        "Conv", "x w", "y", strides=strides, dilations=dilations, pads=pads, group=groups
    )
    inputs = {
        "x": normal(2, 3, *image),
        "w": normal(features, 3 // groups, *kernel, seed=1),
    }
    graph = Graph([conv], inputs)
    u = normal(*graph.g.shape("y"), seed=2)
    back = vjp(graph.g, graph.nodes, {"y": graph.seed("y", u)}, ["x", "w"])
    v = {k: normal(*inputs[k].shape, seed=3) for k in ("x", "w")}
    ahead = jvp(graph.g, graph.nodes, {k: graph.seed(k, t) for k, t in v.items()})
    found = graph.run(back | {"y": ahead["y"]})
    left = (u.astype(np.float64) * found["y"]).sum()
    right = sum((v[k].astype(np.float64) * found[k]).sum() for k in v)
    size = sum(np.abs(v[k] * found[k]).sum() for k in v) + 1
    assert abs(left - right) <= 1e-5 * size
