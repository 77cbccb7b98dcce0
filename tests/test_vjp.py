"""The two drivers: activity, sums over uses, and what they refuse."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from forward_graph import Graph, node, normal

from edgetrain.compiler.build import GraphBuilder
from edgetrain.compiler.jvp import jvp
from edgetrain.compiler.vjp import prepare, vjp
from edgetrain.errors import GraphError, UnsupportedOpError
from edgetrain.tensors import TensorSpec


def test_cotangents_of_several_uses_add_up() -> None:
    x = normal(3)
    nodes = [node("Mul", "x x", "a"), node("Add", "a x", "b"), node("Exp", "x", "c")]
    graph = Graph([*nodes, node("Sum", "b c x", "y")], {"x": x})
    back = vjp(graph.g, graph.nodes, {"y": graph.seed("y")}, ["x"])
    np.testing.assert_allclose(graph.run(back)["x"], 2 * x + 2 + np.exp(x), rtol=1e-6)


def test_a_seeded_value_that_is_used_further_sums_both() -> None:
    x = normal(3)
    graph = Graph([node("Exp", "x", "a"), node("Neg", "a", "y")], {"x": x})
    seeds = {"y": graph.seed("y"), "a": graph.seed("a", np.full(3, 5, np.float32))}
    back = vjp(graph.g, graph.nodes, seeds, ["x", "a", "y"])
    found = graph.run({k: v for k, v in back.items() if k != "y"})
    np.testing.assert_allclose(found["a"], np.full(3, 4.0))
    np.testing.assert_allclose(found["x"], 4 * np.exp(x), rtol=1e-6)
    assert back["y"] == seeds["y"]


def test_values_without_a_path_to_a_seed_are_absent() -> None:
    inputs = {"x": normal(3), "z": normal(3), "w": normal(3)}
    graph = Graph([node("Mul", "x w", "y"), node("Exp", "z", "other")], inputs)
    back = vjp(graph.g, graph.nodes, {"y": graph.seed("y")}, ["w", "z", "other"])
    assert set(back) == {"w"}
    assert set(jvp(graph.g, graph.nodes, {"z": graph.seed("z")})) == {"z", "other"}


def test_derivatives_stop_at_integers_and_at_steps() -> None:
    nodes = [
        node("Cast", "x", "i", to=onnx.TensorProto.INT64),
        node("Cast", "i", "f", to=onnx.TensorProto.FLOAT),
        node("Floor", "x", "s"),
        node("Sum", "f s w", "y"),
    ]
    graph = Graph(nodes, {"x": normal(3), "w": normal(3)})
    assert set(vjp(graph.g, graph.nodes, {"y": graph.seed("y")}, ["x", "w"])) == {"w"}
    assert "y" not in jvp(graph.g, graph.nodes, {"x": graph.seed("x")})


def test_an_unknown_op_matters_only_on_a_path() -> None:
    nodes = [
        node("Det", "x", "d"),
        node("Mul", "d w", "y"),
        node("Det", "x", "unused"),
    ]
    graph = Graph(nodes, {"x": normal(2, 2), "w": normal(1)})
    assert set(vjp(graph.g, graph.nodes, {"y": graph.seed("y")}, ["w"])) == {"w"}
    with pytest.raises(UnsupportedOpError, match="Det") as caught:
        vjp(graph.g, graph.nodes, {"y": graph.seed("y")}, ["x"])
    assert caught.value.node == "Det(x)"
    assert caught.value.op_type == "Det"
    with pytest.raises(UnsupportedOpError, match="Det"):
        jvp(graph.g, graph.nodes, {"x": graph.seed("x")})


REFUSED = {
    "negative alpha": node("LeakyRelu", "x", "y", alpha=-0.1),
    "trace": node("Einsum", "x", "y", equation="ii->i"),
    "running mean": node("BatchNormalization", "x c c c c", "y m v", training_mode=1),
    "no axis": node("ReduceSumSquare", "x none", "y", noop_with_empty_axes=1),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_rule_cannot_do_it_refuses(case: str) -> None:
    inputs = {"x": normal(3, 3), "c": normal(3)}
    constants = {"none": np.zeros(0, np.int64)}
    graph = Graph([REFUSED[case]], inputs, constants)
    with pytest.raises(UnsupportedOpError, match=REFUSED[case].op_type):
        vjp(graph.g, graph.nodes, {"y": graph.seed("y")}, ["x"])


def test_axes_computed_at_run_time_are_refused_by_name() -> None:
    shapes = {"x": (3,), "y": (1,), "dy": (1,)}
    specs = {k: TensorSpec(k, "float32", shape) for k, shape in shapes.items()}
    g = GraphBuilder(specs | {"axes": TensorSpec("axes", "int64", (1,))}, {})
    with pytest.raises(GraphError, match="axes"):
        vjp(g, [node("ReduceSum", "x axes", "y")], {"y": "dy"}, ["x"])


def test_statistics_of_a_normalisation_cannot_be_differentiated() -> None:
    layer = node("LayerNormalization", "x scale", "y mean")
    graph = Graph([layer], {"x": normal(2, 4), "scale": normal(4)})
    with pytest.raises(UnsupportedOpError, match="first output"):
        vjp(graph.g, graph.nodes, {"mean": graph.seed("mean")}, ["x"])


def test_prepare_adds_the_statistics_of_layer_normalisations() -> None:
    plain = node("LayerNormalization", "x s", "y", axis=1)
    graph = Graph(
        [plain, node("Relu", "y", "z")], {"x": normal(2, 3, 4), "s": normal(3, 4)}
    )
    first, second = graph.nodes
    assert first.outputs == ("y", "y/mean", "y/inv_std")
    assert first.inputs == plain.inputs
    assert second.op_type == "Relu"
    assert graph.g.shape("y/mean") == graph.g.shape("y/inv_std") == (2, 1, 1)
    assert prepare(graph.g, graph.nodes) == graph.nodes


def test_a_split_with_one_used_part_pads_with_zeros() -> None:
    x = normal(2, 6)
    split = node("Split", "x", "a b c", axis=1, num_outputs=3)
    graph = Graph([split, node("Exp", "b", "y")], {"x": x})
    back = vjp(graph.g, graph.nodes, {"y": graph.seed("y")}, ["x"])
    expected = np.zeros_like(x)
    expected[:, 2:4] = np.exp(x[:, 2:4])
    np.testing.assert_allclose(graph.run(back)["x"], expected, rtol=1e-6)
