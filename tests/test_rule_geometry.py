"""Rules on any geometry: pads, index tuples, windows of channels."""

from __future__ import annotations

import numpy as np
from forward_graph import Graph, node, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.compiler.build import GraphBuilder
from edgetrain.compiler.rules.places import flat_rows
from edgetrain.compiler.vjp import vjp

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True)


def pulled(graph: Graph, dy: np.ndarray) -> np.ndarray:
    """The cotangent of x for a cotangent of y."""
    back = vjp(graph.g, graph.nodes, {"y": graph.seed("y", dy)}, ["x"])
    return graph.run({"x": graph.g("Identity", back["x"])})["x"]


@given(data=st.data())
@SETTINGS
def test_a_pad_goes_back_to_what_it_was_copied_from(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(["edge", "reflect", "wrap"]))
    shape = [data.draw(st.integers(1, 5)) for _ in range(2)]
    most = [n - 1 if mode == "reflect" else 3 if mode == "edge" else n for n in shape]
    pads = [data.draw(st.integers(0, most[i % 2])) for i in range(4)]
    x = np.zeros(shape, np.float32)
    graph = Graph(
        [node("Pad", "x pads", "y", mode=mode)], {"x": x}, {"pads": np.array(pads)}
    )
    dy = normal(*graph.g.shape("y"))
    around = [(pads[0], pads[2]), (pads[1], pads[3])]
    source = np.pad(np.arange(x.size).reshape(shape), around, mode=mode)
    expected = np.bincount(source.ravel(), dy.ravel(), x.size).reshape(shape)
    np.testing.assert_allclose(pulled(graph, dy), expected, atol=1e-5)


@given(data=st.data())
@SETTINGS
def test_index_tuples_name_the_rows_that_numpy_names(data: st.DataObject) -> None:
    batch = [data.draw(st.integers(1, 3)) for _ in range(data.draw(st.integers(0, 2)))]
    shape = (*batch, *(data.draw(st.integers(1, 4)) for _ in range(3)))
    depth = data.draw(st.integers(1, 3))
    rows = data.draw(st.integers(1, 4))
    indexed = shape[len(batch) : len(batch) + depth]
    seed = data.draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    indices = np.stack(
        [rng.integers(-n, n, (*batch, rows)) for n in indexed], axis=-1
    ).astype(np.int64)
    g = GraphBuilder({}, {})
    found = flat_rows(g, g.constant(indices), shape, len(batch))
    wrapped = [indices[..., i] % n for i, n in enumerate(indexed)]
    leading = np.indices((*batch, rows))[: len(batch)]
    expected = np.ravel_multi_index((*leading, *wrapped), (*batch, *indexed)).ravel()
    np.testing.assert_array_equal(g.value(found.name), expected)
    assert found.count == expected.size
    assert found.extent == np.prod((*batch, *indexed))


@given(data=st.data())
@SETTINGS
def test_rows_found_at_run_time_are_those_found_ahead(data: st.DataObject) -> None:
    """GatherND with batches, its indices as a constant and as an input."""
    batch, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    x = normal(batch, 3, 4)
    depth = data.draw(st.integers(1, 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    indices = rng.integers(-3, 3, (batch, rows, depth))
    gather = node("GatherND", "x i", "y", batch_dims=1)
    ahead = Graph([gather], {"x": x}, {"i": indices})
    later = Graph([gather], {"x": x, "i": indices})
    dy = normal(*ahead.g.shape("y"), seed=1)
    np.testing.assert_allclose(pulled(ahead, dy), pulled(later, dy), atol=1e-6)


@given(st.integers(1, 6), st.sampled_from([1, 3, 5, 7, 9]))
@SETTINGS
def test_a_response_window_may_reach_past_all_channels(channels: int, size: int) -> None:
    x = normal(2, channels, 2, 3)
    response = node("LRN", "x", "y", size=size, alpha=3.0, beta=0.5, bias=1.0)
    graph = Graph([response], {"x": x})
    dy = normal(*x.shape, seed=1)
    exact = x.astype(np.float64)
    reach = [slice(max(0, c - size // 2), c + size // 2 + 1) for c in range(channels)]
    base = np.stack([1 + 3 / size * (exact[:, r] ** 2).sum(1) for r in reach], 1)
    moved = dy * exact * base**-1.5
    spread = np.stack([moved[:, r].sum(1) for r in reach], 1)
    expected = dy * base**-0.5 - 3 / size * exact * spread
    np.testing.assert_allclose(pulled(graph, dy), expected, rtol=1e-4, atol=1e-5)
