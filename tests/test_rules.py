"""The laws every differentiation rule obeys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper
from rule_case import Case
from rule_cases import CASES

from edgetrain.compiler.build import GraphBuilder, Node, live_nodes
from edgetrain.compiler.jvp import jvp
from edgetrain.compiler.rules.base import MultiRule, Saves, saved
from edgetrain.compiler.rules.table import MULTI_RULES, RULES, rule_of
from edgetrain.compiler.vjp import vjp
from edgetrain.tensors import TensorSpec


def session(g: GraphBuilder, inputs: list[str], outputs: list[str]) -> ort.InferenceSession:
    """Of the live part of `g`; the outputs' types are left to inference."""
    nodes = live_nodes(g.nodes, set(outputs))
    used = {i for n in nodes for i in n.reads}
    model = g.model([g.spec(i) for i in inputs], [], "case")
    body = helper.make_graph(
        [n.to_proto() for n in nodes],
        "case",
        model.graph.input,
        [helper.make_empty_tensor_value_info(o) for o in outputs],
        [
            helper.make_tensor(n, helper.np_dtype_to_tensor_dtype(g.value(n).dtype),
                               g.value(n).shape, g.value(n).ravel())
            for n in used
            if n and g.is_constant(n)
        ],
    )  # fmt: skip
    full = helper.make_model(body, opset_imports=model.opset_import, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    return ort.InferenceSession(full.SerializeToString(), options)


def run(model: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Feeds copies, as a training BatchNormalization may write into what it is fed."""
    return model.run(None, {k: np.array(v) for k, v in feeds.items()})


@dataclass
class Primal:
    """A case as a graph, with its forward values known."""

    case: Case
    g: GraphBuilder
    node: Node
    wrt: list[str]
    feeds: dict[str, np.ndarray]
    forward: ort.InferenceSession
    values: dict[str, np.ndarray]

    @property
    def outputs(self) -> list[str]:
        """Those that are differentiated."""
        return list(
            self.node.outputs if self.node.op_type in MULTI_RULES else [self.node.output]
        )


def primal(case: Case) -> Primal:
    names = tuple("" if v is None else f"x{i}" for i, v in enumerate(case.inputs))
    outputs = tuple(f"y{i}" for i in range(case.outputs))
    node = Node(case.op, str(case), names, outputs, case.attributes)
    values, constants = {}, {}
    for i, (name, value) in enumerate(zip(names, case.inputs, strict=True)):
        if value is None:
            continue
        known = i in case.fixed and case.op != "BatchNormalization"
        is_constant = known or (value.dtype == np.int64 and not case.runtime)
        (constants if is_constant else values)[name] = value
    specs = {
        k: TensorSpec(k, v.dtype.name, v.shape) for k, v in (values | constants).items()
    }
    g = GraphBuilder(specs, constants)
    g.append(node)
    forward = session(g, list(values), list(outputs))
    found = run(forward, values)
    for name, value in zip(outputs, found, strict=True):
        g.describe(name, value.dtype.name, value.shape)
    wrt = [
        n for i, n in enumerate(names)
        if n in values and values[n].dtype.kind == "f" and i not in case.fixed
    ]  # fmt: skip
    everything = values | constants | dict(zip(outputs, found, strict=True))
    return Primal(case, g, node, wrt, values, forward, everything)


def draw(p: Primal, names: list[str], prefix: str, seed: int) -> dict[str, np.ndarray]:
    """A random vector beside each of some values, described to the builder."""
    rng = np.random.default_rng(seed)
    vectors = {}
    for name in names:
        value = p.values[name]
        vectors[prefix + name] = rng.uniform(-1, 1, value.shape).astype(value.dtype)
        p.g.describe(prefix + name, value.dtype.name, value.shape)
    return vectors


def differentiate(
    p: Primal, wrt: list[str]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Random u and v, and what the two modes make of them."""
    u, v = draw(p, p.outputs, "u/", 1), draw(p, wrt, "v/", 2)
    back = vjp(p.g, [p.node], {y: f"u/{y}" for y in p.outputs}, wrt)
    ahead = jvp(p.g, [p.node], {x: f"v/{x}" for x in wrt})
    assert set(back) == set(wrt)
    assert set(ahead) >= set(p.outputs)
    names = [back[x] for x in wrt] + [ahead[y] for y in p.outputs]
    feeds = p.feeds | u | v
    distinct = list(dict.fromkeys(names))
    model = session(p.g, list(feeds), distinct)
    found = dict(zip(distinct, run(model, feeds), strict=True))
    results = {x: found[back[x]] for x in wrt} | {y: found[ahead[y]] for y in p.outputs}
    return u, v, results


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_two_modes_are_transposes_and_match_differences(case: Case) -> None:
    p = primal(case)
    u, v, results = differentiate(p, p.wrt)
    for name, value in results.items():
        assert value.shape == p.values[name].shape
        assert value.dtype == p.values[name].dtype

    left = [u[f"u/{y}"].astype(np.float64) * results[y] for y in p.outputs]
    right = [v[f"v/{x}"].astype(np.float64) * results[x] for x in p.wrt]
    size = sum(np.abs(t).sum() for t in left + right)
    assert abs(sum(t.sum() for t in left) - sum(t.sum() for t in right)) <= 1e-5 * size

    if case.random:
        return
    for y, numeric in zip(p.outputs, central_difference(p, v), strict=False):
        scale = np.abs(numeric).max() + 0.1
        np.testing.assert_allclose(results[y], numeric, atol=2e-3 * scale, rtol=0)


def central_difference(p: Primal, v: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The derivative along v, of fourth order in the step."""
    step = 5e-3

    def at(t: float) -> list[np.ndarray]:
        moved = {x: p.feeds[x] + p.feeds[x].dtype.type(t) * v[f"v/{x}"] for x in p.wrt}
        return [y.astype(np.float64) for y in run(p.forward, p.feeds | moved)]

    near = [a - b for a, b in zip(at(step), at(-step), strict=True)]
    far = [a - b for a, b in zip(at(2 * step), at(-2 * step), strict=True)]
    return [(8 * n - f) / (12 * step) for n, f in zip(near, far, strict=True)]


@pytest.mark.parametrize("case", [c for c in CASES if len(c.inputs) > 1], ids=str)
def test_a_tangent_of_one_input_has_the_outputs_shape(case: Case) -> None:
    p = primal(case)
    together = differentiate(p, p.wrt)[2]
    parts = []
    for x in p.wrt:
        single = primal(case)
        v = draw(p, p.wrt, "v/", 2)
        single.g.describe(f"v/{x}", v[f"v/{x}"].dtype.name, v[f"v/{x}"].shape)
        ahead = jvp(single.g, [single.node], {x: f"v/{x}"})
        feeds = single.feeds | {f"v/{x}": v[f"v/{x}"]}
        model = session(single.g, list(feeds), [ahead[y] for y in p.outputs])
        parts.append(run(model, feeds))
    for i, y in enumerate(p.outputs):
        for part in parts:
            assert part[i].shape == p.values[y].shape
        total = sum(part[i].astype(np.float64) for part in parts)
        scale = np.abs(total).max() + 1
        np.testing.assert_allclose(together[y], total, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_vjp_reads_only_what_it_declares(case: Case) -> None:
    p = primal(case)
    rule = rule_of(p.node)
    primals = {n for n in (*p.node.inputs, *p.node.outputs) if n and not p.g.is_constant(n)}
    draw(p, p.outputs, "u/", 1)
    before = len(p.g.nodes)
    seeds = tuple(f"u/{y}" for y in p.outputs)
    if isinstance(rule, MultiRule):
        wanted = rule.vjp(p.g, p.node, seeds)
    else:
        wanted = rule.vjp(p.g, p.node, seeds[0])
    live = live_nodes(p.g.nodes[before:], {w for w in wanted if w})
    read = {i for node in live for i in node.reads} & primals
    assert read <= saved(rule, p.node)


def test_every_rule_has_a_case_and_every_case_a_rule() -> None:
    assert {c.op for c in CASES} == set(RULES) | set(MULTI_RULES)
    assert not set(RULES) & set(MULTI_RULES)


def test_saved_names_the_values_of_each_part() -> None:
    node = Node("Clip", "n", ("x", "", "high"), ("y", "extra"))
    expected = {
        Saves.NOTHING: set(),
        Saves.FIRST: {"x"},
        Saves.REST: {"high"},
        Saves.INPUTS: {"x", "high"},
        Saves.OUTPUT: {"y"},
        Saves.EXTRA | Saves.FIRST: {"x", "extra"},
    }
    for part, names in expected.items():
        rule = MultiRule(lambda *_: (), lambda *_: (), part)
        assert saved(rule, node) == names
