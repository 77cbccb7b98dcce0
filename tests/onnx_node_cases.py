"""The onnx package's own node tests, as graphs at the compiler's opset."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.case.test_case import TestCase

from edgetrain.compiler import reference, shapes
from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.decompose import decompose
from edgetrain.compiler.fold import convert, fold
from edgetrain.compiler.intake import refuse_control_flow, to_float32
from edgetrain.compiler.jvp import jvp
from edgetrain.compiler.masked_rows import guard_masked_rows
from edgetrain.compiler.rules.table import MULTI_RULES, RULES
from edgetrain.compiler.tidy import drop_dead, settle_casts
from edgetrain.compiler.values import constants, value_table
from edgetrain.compiler.vjp import vjp
from edgetrain.errors import EngineError, GraphError, UnsupportedOpError

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}
MODERN_IR = 10
# Float inputs that say what to do, by name: constants, as in the files that users have.
SETTINGS = {
    "Dropout": {"r"},
    "OneHot": {"indices", "depth"},
    "Resize": {"roi", "scales"},
    "Upsample": {"scales"},
}

EXPANDED = "an op that is tried whole, in pieces"
DOMAIN = "an op of another domain"
VALUES = "sequences or optional values"
NO_FLOATS = "no floats in, or none out"
LOOP = "control flow"
OPSET = "no way to opset 20"
DYNAMIC = "a shape that depends on the data"
ENGINE = "no kernel in ONNX Runtime"
RULE = "no rule"
REFUSED = "a rule that refuses this form"
STILL = "no derivative to take"
INFINITE = "a pole, or infinite inputs"


Arrays = dict[str, np.ndarray]
Counts = dict[str, dict[str, int]]  # by reason and op


class LeftOutError(Exception):
    """Why a case cannot be tried."""


@dataclass(frozen=True)
class NodeCase:
    """One test of the onnx package, differentiated.

    Attributes:
        name: the package's.
        model: static shapes; what is not differentiated is a constant.
        feeds: of the model's inputs, float32.
        outputs: those that are differentiated.
        u, v: random vectors beside the outputs and the inputs.
        ahead: J v, by output.
        back: the transpose of J times u, by input.
    """

    name: str
    model: onnx.ModelProto
    feeds: Arrays
    outputs: tuple[str, ...]
    u: Arrays
    v: Arrays
    ahead: Arrays
    back: Arrays


@cache
def node_cases() -> tuple[dict[str, list[NodeCase]], Counts]:
    """What can be tried, by op; and how many of each op cannot, by reason."""
    ready: defaultdict[str, list[NodeCase]] = defaultdict(list)
    left: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # some cases are about overflow
        collected = collect_testcases(None)
    for case in collected:
        op = case.model.graph.node[0].op_type
        try:
            prepared = _prepared(case)
        except LeftOutError as error:
            left[str(error)][op] += 1
        else:
            ready[op].append(prepared)
    return dict(ready), {reason: dict(counts) for reason, counts in left.items()}


def _prepared(case: TestCase) -> NodeCase:
    _check(case)
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    model.ir_version = MODERN_IR
    to_float32(model)
    feeds = _feeds(model, case.data_sets[0][0])
    for out in model.graph.output:
        out.type.tensor_type.ClearField("shape")
    with _left_out(LOOP):
        refuse_control_flow(model.graph)
    with _left_out(OPSET):
        model = decompose(model, feeds)
        fold(model, feeds)
        model = convert(model)
        fold(model, feeds)
    with _left_out(DYNAMIC):
        model = shapes.infer(model)
        settle_casts(model.graph)
        guard_masked_rows(model.graph)
        drop_dead(model.graph)
        model = shapes.complete(model, feeds)
    return _differentiated(case.name, model, feeds)


def _check(case: TestCase) -> None:
    graph = case.model.graph
    infos = [*graph.input, *graph.output]
    if "_expanded" in case.name:
        raise LeftOutError(EXPANDED)
    if graph.node[0].domain not in ("", "ai.onnx"):
        raise LeftOutError(DOMAIN)
    if not all(info.type.HasField("tensor_type") for info in infos):
        raise LeftOutError(VALUES)
    for ends in (graph.input, graph.output):
        if FLOATS.isdisjoint(info.type.tensor_type.elem_type for info in ends):
            raise LeftOutError(NO_FLOATS)


def _feeds(model: onnx.ModelProto, values: list) -> Arrays:
    """The float inputs; all other inputs become constants of the model."""
    graph = model.graph
    settings = SETTINGS.get(graph.node[0].op_type, set())
    feeds, kept = {}, []
    for info, value in zip(graph.input, values, strict=False):
        proto = isinstance(value, TensorProto)
        array = numpy_helper.to_array(value) if proto else np.asarray(value)
        if array.dtype in (np.float16, np.float64):
            array = np.asarray(array, np.float32)
        if array.dtype == np.float32 and info.name not in settings:
            feeds[info.name] = array
            kept.append(info)
        else:
            graph.initializer.append(numpy_helper.from_array(array, info.name))
    del graph.input[:]
    graph.input.extend(kept)
    return feeds


def _differentiated(name: str, model: onnx.ModelProto, feeds: Arrays) -> NodeCase:
    g = GraphBuilder(value_table(model), constants(model))
    nodes = [Node.from_proto(proto) for proto in model.graph.node]
    for node in nodes:
        g.append(node)
    outputs = tuple(o.name for o in model.graph.output if g.is_float(o.name))
    if len(nodes) == 1 and nodes[0].op_type in RULES:
        outputs = outputs[:1]
    rng = np.random.default_rng(0)
    u, v = _draw(g, "u/", outputs, rng), _draw(g, "v/", feeds, rng)
    with _left_out(DYNAMIC):
        back = vjp(g, nodes, {y: f"u/{y}" for y in u}, list(v))
        ahead = jvp(g, nodes, {x: f"v/{x}" for x in v})
    if not back:
        raise LeftOutError(STILL)
    sources = {f"back/{x}": (dx, x) for x, dx in back.items()}
    sources |= {f"ahead/{y}": (ahead[y], y) for y in u if y in ahead}
    for result, (value, primal) in sources.items():
        g.append(Node("Identity", result, (value,), (result,)))
        g.describe(result, "float32", g.shape(primal))
    vectors = {f"u/{k}": a for k, a in u.items()} | {f"v/{k}": a for k, a in v.items()}
    fed = feeds | vectors
    wanted = [g.spec(name) for name in (*outputs, *sources)]
    laws = g.model([g.spec(name) for name in fed], wanted, "laws")
    with _left_out(ENGINE):
        found = reference.run(laws, fed)
    if not all(np.isfinite(found[name]).all() for name in sources):
        raise LeftOutError(INFINITE)
    forward = {y: found[f"ahead/{y}"] for y in u if y in ahead}
    return NodeCase(
        name, model, feeds, outputs, u, v, forward, {x: found[f"back/{x}"] for x in back}
    )


def _draw(
    g: GraphBuilder, prefix: str, names: Iterable[str], rng: np.random.Generator
) -> Arrays:
    """A random vector beside each of some values, described to the builder."""
    vectors = {}
    for name in names:
        g.describe(prefix + name, "float32", g.shape(name))
        vectors[name] = rng.uniform(-1, 1, g.shape(name)).astype(np.float32)
    return vectors


@contextmanager
def _left_out(reason: str) -> Iterator[None]:
    try:
        yield
    except UnsupportedOpError as error:
        known = error.op_type in RULES or error.op_type in MULTI_RULES
        raise LeftOutError(REFUSED if known else RULE) from error
    except GraphError as error:
        raise LeftOutError(reason) from error
    except EngineError as error:
        raise LeftOutError(ENGINE) from error
