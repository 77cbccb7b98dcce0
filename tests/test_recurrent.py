"""Recurrent operators: any sizes, any of their outputs, in a stage, and what is refused."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx
import pytest
from forward_graph import Graph, node, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.compiler.build import Node, live_nodes
from edgetrain.compiler.cost import node_flop
from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.jvp import jvp
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.stash import Keep
from edgetrain.compiler.vjp import prepare, vjp
from edgetrain.errors import UnsupportedOpError
from edgetrain.manifest import GraphName, Mode, Role
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.stage import Stage
from tests.small_models import build
from tests.stage_runs import stages_of, train_pass

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
OUTPUTS = {"LSTM": "y h c", "GRU": "y h", "RNN": "y h"}
WEIGHTS = ["x", "w", "r", "b"]


def recurrent(
    op: str, sizes: tuple[int, int, int, int] = (4, 2, 3, 5), **attributes: object
) -> tuple[Node, dict[str, np.ndarray]]:
    """A node of all outputs on T, N, I, H, and its inputs."""
    steps, batch, features, hidden = sizes
    count = 2 if attributes.get("direction") == "bidirectional" else 1
    rows = GATES[op] * hidden
    inputs = {
        "x": normal(steps, batch, features),
        "w": normal(count, rows, features, seed=1) / np.float32(2),
        "r": normal(count, rows, hidden, seed=2) / np.float32(2 * hidden**0.5),
        "b": normal(count, 2 * rows, seed=3) / np.float32(2),
    }
    return node(op, "x w r b", OUTPUTS[op], hidden_size=hidden, **attributes), inputs


@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_modes_are_transposes_at_any_size(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(sorted(GATES)))
    sizes = tuple(data.draw(st.integers(1, 4)) for _ in range(4))
    directions = st.sampled_from(["forward", "reverse", "bidirectional"])
    attributes = {"direction": data.draw(directions)}
    if op == "GRU":
        attributes["linear_before_reset"] = data.draw(st.integers(0, 1))
    forward, inputs = recurrent(op, sizes, **attributes)
    graph = Graph([forward], inputs)
    v = {k: normal(*inputs[k].shape, seed=4) for k in WEIGHTS}
    u = {k: normal(*graph.g.shape(k), seed=5) for k in forward.outputs}
    seeds = {k: graph.seed(k, value) for k, value in u.items()}
    back = vjp(graph.g, graph.nodes, seeds, WEIGHTS)
    ahead = jvp(graph.g, graph.nodes, {k: graph.seed(k, t) for k, t in v.items()})
    found = graph.run(back | {k: ahead[k] for k in u})
    left = [(u[k].astype(np.float64) * found[k]) for k in u]
    right = [(v[k].astype(np.float64) * found[k]) for k in v]
    size = sum(np.abs(t).sum() for t in left + right)
    assert abs(sum(t.sum() for t in left) - sum(t.sum() for t in right)) <= 1e-5 * size


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("op", GATES)
def test_cotangents_of_the_single_outputs_add_up(op: str, direction: str) -> None:
    forward, inputs = recurrent(op, direction=direction)

    def gradients(names: tuple[str, ...]) -> dict[str, np.ndarray]:
        graph = Graph([forward], dict(inputs))
        seeds = {y: graph.seed(y, normal(*graph.g.shape(y), seed=6)) for y in names}
        return graph.run(vjp(graph.g, graph.nodes, seeds, WEIGHTS))

    together = gradients(forward.outputs)
    parts = [gradients((y,)) for y in forward.outputs]
    for name in WEIGHTS:
        assert all(np.abs(part[name]).max() > 1e-3 for part in parts)
        total = sum(part[name] for part in parts)
        np.testing.assert_allclose(together[name], total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", GATES)
def test_hidden_states_that_nobody_reads_are_declared_or_run_again(op: str) -> None:
    whole, inputs = recurrent(op)
    last = Node(op, "last", whole.inputs, ("", "h"), whole.attributes)

    def gradients(forward: Node, prepared: bool) -> dict[str, np.ndarray]:
        graph = Graph([forward], dict(inputs))
        assert graph.nodes[0].outputs[0] == (forward.output or "h/all_steps")
        nodes = graph.nodes if prepared else [forward]
        before = len(graph.g.nodes)
        back = vjp(graph.g, nodes, {"h": graph.seed("h", normal(1, 2, 5))}, WEIGHTS)
        emitted = live_nodes(graph.g.nodes[before:], set(back.values()))
        assert [n.op_type for n in emitted].count(op) == int(not prepared)
        return graph.run(back)

    expected = gradients(whole, prepared=True)
    for prepared in (True, False):
        found = gradients(last, prepared)
        for name in WEIGHTS:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_prepare_leaves_a_node_that_yields_its_hidden_states() -> None:
    forward, inputs = recurrent("LSTM")
    graph = Graph([forward], inputs)
    assert graph.nodes == [forward] == prepare(graph.g, graph.nodes)


@pytest.mark.parametrize("op", GATES)
def test_the_backward_graph_does_not_grow_with_time(op: str) -> None:
    def emitted(steps: int) -> list[str]:
        forward, inputs = recurrent(op, (steps, 2, 3, 5), direction="bidirectional")
        graph = Graph([forward], inputs)
        before = len(graph.g.nodes)
        back = vjp(graph.g, graph.nodes, {"y": graph.seed("y")}, WEIGHTS)
        return [n.op_type for n in live_nodes(graph.g.nodes[before:], set(back.values()))]

    short, long = emitted(2), emitted(50)
    assert short == long
    assert long.count("Scan") == (4 if op == "LSTM" else 2)


def test_the_arithmetic_of_a_node_is_that_of_its_products() -> None:
    forward, inputs = recurrent("GRU", (4, 2, 3, 5), direction="bidirectional")
    last = Node("GRU", "last", forward.inputs, ("", "h"), forward.attributes)
    for one in (forward, last):
        g = Graph([one], dict(inputs)).g
        values = {k: g.spec(k) for k in (*inputs, *filter(None, one.outputs))}
        assert node_flop(one, values) == 2 * (4 * 2) * 2 * (3 * 5) * (3 + 5)


REFUSED = {
    "clip": ("clips", {"clip": 3.0}),
    "coupled gates": ("gates are one", {"input_forget": 1}),
    "batch first": ("layout 0", {"layout": 1}),
    "activation": ("Softsign", {"activations": ["Sigmoid", "Softsign", "Tanh"]}),
    "parameters": ("parameters", {"activation_alpha": [0.3]}),
    "lengths": ("sequence_lens", {}),
    "varying lengths": ("sequence_lens", {}),
}


@pytest.mark.parametrize("mode", ["vjp", "jvp"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_rule_is_refused_with_a_way_out(case: str, mode: str) -> None:
    words, attributes = REFUSED[case]
    forward, inputs = recurrent("LSTM", **attributes)
    constants = {}
    if "lengths" in case:
        lengths = np.array([4, 3] if case == "lengths" else [4, 4], np.int32)
        (constants if case == "lengths" else inputs)["n"] = lengths
        names = (*forward.inputs, "n")
        forward = Node("LSTM", "short", names, forward.outputs, forward.attributes)
    graph = Graph([forward], inputs, constants)
    u, v = {"y": graph.seed("y")}, {"w": graph.seed("w")}
    differentiate = (
        partial(vjp, graph.g, [forward], u, ["w"])
        if mode == "vjp"
        else partial(jvp, graph.g, [forward], v)
    )
    with pytest.raises(UnsupportedOpError, match=words) as caught:
        differentiate()
    assert caught.value.node == forward.name


def tagger() -> onnx.ModelProto:
    """x [N, 6, 3] -> LSTM both ways -> GRU, whose last state is read -> y [N, 4]."""
    make = onnx.helper.make_node
    _, lstm = recurrent("LSTM", (6, 4, 3, 5), direction="bidirectional")
    _, gru = recurrent("GRU", (6, 4, 10, 7))
    both = {"direction": "bidirectional", "hidden_size": 5}
    return build(
        [
            make("Transpose", ["x"], ["steps"], "turn", perm=[1, 0, 2]),
            make("LSTM", ["steps", "w1", "r1", "b1"], ["h1"], "lstm", **both),
            make("Transpose", ["h1"], ["sides"], "sides", perm=[0, 2, 1, 3]),
            make("Reshape", ["sides", "flat"], ["joined"], "join"),
            make("GRU", ["joined", "w2", "r2", "b2"], ["", "h2"], "gru",
                 hidden_size=7, linear_before_reset=1),
            make("Squeeze", ["h2", "nought"], ["last"], "last"),
            make("Gemm", ["last", "w3", "b3"], ["y"], "classify"),
        ],
        [("x", ["N", 6, 3])],
        ["y"],
        {
            **{f"{k}1": lstm[k] for k in "wrb"},
            **{f"{k}2": gru[k] for k in "wrb"},
            "w3": normal(7, 4) / np.float32(3),
            "b3": np.zeros(4, np.float32),
            "flat": np.array([6, -1, 10], np.int64),
            "nought": np.array([0], np.int64),
        },
    )  # fmt: skip


FEEDS = {
    "x": normal(4, 6, 3, seed=8),
    "labels": np.array([0, 1, 2, 3], np.int64),
}


def stages_cut_after(*names: str) -> list[Stage]:
    program = normalise(tagger(), batch=4)
    finder = CutFinder(program, program.weights)
    modes = (Mode.VJP,) * (len(names) + 1)
    weights = frozenset(program.weights)
    recipe = Recipe(weights, "softmax_cross_entropy", modes, keep=Keep.ALL)
    return stages_of(compile_stages(program, [finder.named(n) for n in names], recipe))


def test_every_stage_of_a_recurrent_model_gives_the_whole_models_gradients() -> None:
    """The LSTM keeps what its backward needs in a stash, the GRU what nobody sends."""
    whole = train_pass(stages_cut_after(), FEEDS).gradients
    stages = stages_cut_after("joined", "last")
    backward = stages[0].manifest.graphs[GraphName.BACKWARD]
    assert [p.name for p in backward.ports(Role.STASH)] == ["steps", "h1"]
    backward = stages[1].manifest.graphs[GraphName.BACKWARD]
    assert [p.name for p in backward.ports(Role.STASH)] == ["h2/all_steps"]
    parts = train_pass(stages, FEEDS).gradients
    assert (
        set(parts)
        == set(whole)
        == {f"{k}{i}" for k in "wrb" for i in (1, 2)}
        | {
            "w3",
            "b3",
        }
    )
    for name, gradient in parts.items():
        scale = np.abs(whole[name]).max()
        assert scale > 0
        np.testing.assert_allclose(gradient, whole[name], atol=1e-5 * scale, rtol=0)


def test_a_recurrent_pipeline_learns() -> None:
    stages = stages_cut_after("joined", "last")
    losses = []
    for step in range(30):
        losses.append(train_pass(stages, FEEDS, Tick(step, 0)).losses.mean())
        for stage in stages:
            stage.update(step)
    assert np.all(np.diff(losses) < 0)
    assert losses[-1] < 0.92 * losses[0]
