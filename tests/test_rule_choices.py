"""What rules return where a derivative is not unique, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from forward_graph import Graph, node, normal

from edgetrain.compiler.build import Node
from edgetrain.compiler.jvp import jvp
from edgetrain.compiler.vjp import vjp
from edgetrain.errors import UnsupportedOpError

ZERO = [0.0]
SLOPES = {
    "Selu": (node("Selu", "x", "y", alpha=2.0, gamma=3.0), ZERO, [6.0]),
    "Celu": (node("Celu", "x", "y", alpha=0.5), ZERO, [1.0]),
    "ThresholdedRelu": (node("ThresholdedRelu", "x", "y", alpha=0.5), [0.5, 1.0], [0, 1]),
    "Shrink": (node("Shrink", "x", "y"), [-0.5, 0.5, 0.75], [0, 0, 1]),
    "Mod": (node("Mod", "x two", "y", fmod=1), [2.0, 3.0], [1, 1]),
    "Asin": (node("Asin", "x", "y"), [-1.0, 1.0], [np.inf, np.inf]),
    "Atanh": (node("Atanh", "x", "y"), [1.0], [np.inf]),
    "LpNormalization": (node("LpNormalization", "x", "y", axis=0), [0.0, 0.0], [0, 0]),
    "ReduceProd": (node("ReduceProd", "x", "y", keepdims=0), [0.0, 3.0, 2.0], [6, 0, 0]),
    "two zeros": (node("ReduceProd", "x", "y", keepdims=0), [0.0, 3.0, 0.0], [0, 0, 0]),
    "TopK": (node("TopK", "x one", "y i"), [2.0, 2.0, 1.0], [1, 0, 0]),
}


@pytest.mark.parametrize("name", SLOPES)
def test_slopes_where_there_is_a_choice(name: str) -> None:
    forward, at, expected = SLOPES[name]
    constants = {"one": np.array([1]), "two": np.float32([2])}
    assert slope(forward, np.float32(at), constants) == pytest.approx(np.float32(expected))


def slope(forward: Node, x: np.ndarray, constants: dict[str, np.ndarray]) -> np.ndarray:
    """The derivative of the sum of y by each element of x."""
    graph = Graph([forward], {"x": x}, constants)
    back = vjp(graph.g, graph.nodes, {"y": graph.seed("y")}, ["x"])
    return graph.run({"x": graph.g("Identity", back["x"])})["x"]


@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_pool_of_zeros_has_no_slope(p: int) -> None:
    x = np.zeros((1, 1, 3, 4), np.float32)
    x[..., 2:] = 1
    pool = node("LpPool", "x", "y", kernel_shape=[1, 2], strides=[1, 2], p=p)
    found = slope(pool, x, {})
    np.testing.assert_array_equal(found[..., :2], 0)
    assert (found[..., 2:] > 0).all()
    whole = node("GlobalLpPool", "x", "y", p=p)
    np.testing.assert_array_equal(slope(whole, np.zeros_like(x), {}), 0)


def test_a_constant_image_has_finite_slopes() -> None:
    """The deviation is 0 there, and the mean's part is all that is left."""
    x = np.full((1, 2, 2, 2), 3, np.float32)
    found = slope(node("MeanVarianceNormalization", "x", "y", axes=[2, 3]), x, {})
    assert np.isfinite(found).all()


def test_a_dropout_is_linear_while_its_mask_stays() -> None:
    """So its derivative along x itself, in the same run, is y."""
    constants = {"ratio": np.array(0.3, np.float32), "on": np.array(True)}
    inputs = {"x": normal(4, 9)}
    graph = Graph([node("Dropout", "x ratio on", "y m", seed=5)], inputs, constants)
    ahead = jvp(graph.g, graph.nodes, {"x": graph.seed("x", inputs["x"])})
    found = graph.run({"x": ahead["y"], "y": "y"})
    assert np.count_nonzero(found["y"]) not in (0, inputs["x"].size)
    np.testing.assert_allclose(found["x"], found["y"], rtol=1e-6)


def test_ties_of_a_scatter_share_evenly() -> None:
    constants = {"i": np.array([1, 1])}
    inputs = {"x": np.float32([5, 2]), "u": np.float32([2, 2])}
    scatter = node("ScatterElements", "x i u", "y", reduction="max")
    graph = Graph([scatter], inputs, constants)
    back = vjp(graph.g, graph.nodes, {"y": graph.seed("y")}, ["x", "u"])
    found = graph.run(back)
    np.testing.assert_allclose(found["x"], [1, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(found["u"], [1 / 3, 1 / 3], rtol=1e-6)


def test_bounds_that_cross_give_all_to_the_upper() -> None:
    inputs = {"x": normal(5), "low": np.float32(2), "high": np.float32(1)}
    graph = Graph(
        [node("Clip", "x low high", "y")], {k: np.asarray(v) for k, v in inputs.items()}
    )
    found = graph.run(vjp(graph.g, graph.nodes, {"y": graph.seed("y")}, list(inputs)))
    assert (found["low"], found["high"]) == (0, 5)
    np.testing.assert_array_equal(found["x"], 0)


REFUSED = {
    "negative gamma": node("Selu", "x", "y", gamma=-1.0),
    "crop and reflect": node("Pad", "x pads", "y", mode="reflect"),
    "no indices": Node("TopK", "t", ("x", "one"), ("y", "")),
    "no mask": node("Dropout", "x half on", "y"),
    "even window": node("LRN", "image", "y", size=2),
    "rounded up": Node(
        "Resize", "r", ("wide", "", "", "sizes"), ("y",),
        {"keep_aspect_ratio_policy": "not_smaller"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_rule_cannot_do_it_refuses(name: str) -> None:
    inputs = {"x": normal(4, 4), "image": normal(1, 4, 2, 2), "wide": normal(3, 5)}
    constants = {
        "pads": np.array([1, -1, 1, 1]),
        "one": np.array([1]),
        "half": np.array(0.5, np.float32),
        "on": np.array(True),
        "sizes": np.array([4, 8]),
    }
    wrt = list(inputs)
    graph = Graph([REFUSED[name]], inputs, constants)
    with pytest.raises(UnsupportedOpError, match=REFUSED[name].op_type):
        vjp(graph.g, graph.nodes, {"y": graph.seed("y")}, wrt)
