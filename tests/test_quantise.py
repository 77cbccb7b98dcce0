"""A quantised forward computes what the float one does, to the width of its grids."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from free_small import SMALL
from onnx import helper
from small_models import build, normal

from coordinator.activation_ranges import activation_ranges
from edgetrain.bundle import Bundle
from edgetrain.compiler import reference
from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.grids import Quantisation, settle
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.origin import origins
from edgetrain.compiler.program import Program
from edgetrain.compiler.quantise import quantise
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.trainable import select_trainable
from edgetrain.compiler.values import constants, value_table
from edgetrain.errors import GraphError
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.manifest import HIGHEST, LOWEST, GraphName, Mode, Role, WeightSpec, view
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.estimators.moved_levels import on_levels
from edgetrain.runtime.estimators.noise import NoiseKey, signs
from edgetrain.samples import Samples
from tests.stage_runs import ENGINE, Arrays, evaluate, gradients, stages_of, train_pass

BATCH = 4
QUANTISED = EstimatorSpec(1, noise="weights", quantised=True)

# By name: node, shape of x, weights, place of the output channels among the first's axes
CASES = {
    "conv": (
        helper.make_node("Conv", ["x", "w", "b"], ["y"], pads=[1, 1, 1, 1]),
        (3, 5, 5),
        {"w": (4, 3, 3, 3), "b": (4,)},
        0,
    ),
    "groups": (
        helper.make_node("Conv", ["x", "w"], ["y"], group=2),
        (4, 5, 5),
        {"w": (6, 2, 3, 3)},
        0,
    ),
    "conv_transpose": (
        helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], strides=[2, 2]),
        (3, 4, 4),
        {"w": (3, 4, 2, 2), "b": (4,)},
        1,
    ),
    "transposed_groups": (
        helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], group=2),
        (4, 4, 4),
        {"w": (4, 3, 2, 2), "b": (6,)},
        1,
    ),
    "gemm": (helper.make_node("Gemm", ["x", "w", "b"], ["y"]), (6,), {"w": (6, 5)}, 1),
    "gemm_turned": (
        helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1),
        (6,),
        {"w": (5, 6), "b": (5,)},
        0,
    ),
    "scaled": (
        helper.make_node("Gemm", ["x", "w", "b"], ["y"], alpha=0.5),
        (6,),
        {"w": (6, 5), "b": (5,)},
        1,
    ),
    "matmul": (helper.make_node("MatMul", ["x", "w"], ["y"]), (3, 6), {"w": (6, 5)}, 1),
    "vector": (helper.make_node("MatMul", ["x", "w"], ["y"]), (3, 6), {"w": (6,)}, 0),
}


def program_of(name: str) -> Program:
    node, shape, tensors, _ = CASES[name]
    proto = onnx.NodeProto()
    proto.CopyFrom(node)
    held = {
        key: normal(*extents, seed=i + 1)
        for i, (key, extents) in enumerate(tensors.items())
    }
    if "b" in proto.input and "b" not in held:
        held["b"] = normal(1, seed=9)  # one for all
    model = build([proto], [("x", ["N", *shape])], ["y"], held)
    return normalise(model, batch=BATCH)


def rewritten(
    program: Program, ranges: dict[str, tuple[float, float]]
) -> tuple[onnx.ModelProto, Quantisation]:
    held, table = constants(program.model), value_table(program.model)
    nodes = [Node.from_proto(proto) for proto in program.model.graph.node]
    made_of = origins(nodes, program.weights, held)
    by = settle(nodes, {**held, **program.weights}, made_of, ranges)
    g = GraphBuilder(table, held)
    for node in quantise(g, nodes, by):
        g.append(node)
    inputs = [*program.inputs, *(table[name] for name in program.weights)]
    return g.model(inputs, program.outputs, "quantised"), by


@pytest.mark.parametrize("name", CASES)
def test_a_linear_op_is_off_by_its_operands_rounding(name: str) -> None:
    """|Q(x) Q(w) - x w| <= (|x| + dx)(|w| + dw) - |x| |w|, each off by half a step."""
    program = program_of(name)
    feeds: Arrays = {"x": normal(*program.inputs[0].shape, seed=5)}
    bound = float(np.abs(feeds["x"]).max())
    model, by = rewritten(program, {"x": (-bound, bound)})
    onnx.checker.check_model(model)
    found = reference.run(model, {**feeds, **program.weights})["y"]
    exact = reference.run(program.model, {**feeds, **program.weights})["y"]
    spec = spec_of("w", program.weights["w"], by)
    dx, dw = bound / 255, spec.steps / 2
    wide = {k: np.abs(v) for k, v in {**feeds, **program.weights}.items()}
    narrow = reference.run(program.model, wide)["y"]
    wide |= {"x": wide["x"] + dx, "w": wide["w"] + dw}
    if "b" in wide:
        wide["b"] = wide["b"] + dx * spec.steps.max()
    room = reference.run(program.model, wide)["y"] - narrow
    assert np.all(np.abs(found - exact) <= room * (1 + 1e-4) + 1e-5)
    assert not np.array_equal(found, exact)
    channels = program.weights["w"].shape[CASES[name][3]]
    assert len(spec.lsb) == (1 if name == "vector" else channels)


def spec_of(name: str, value: np.ndarray, by: Quantisation) -> WeightSpec:
    grid = by.grids[name]
    kind = {"lsb": grid.scales, "lsb_axis": grid.axis}
    return WeightSpec(name, value.shape, 0, True, **kind)


def test_an_activation_without_a_range_is_refused() -> None:
    with pytest.raises(GraphError, match="'x'"):
        rewritten(program_of("gemm"), {})


@cache
def two_stages(
    name: str, spec: EstimatorSpec = QUANTISED, mode: Mode = Mode.HYBRID
) -> tuple[list[Bundle], Arrays]:
    """All but the last layer of a small net in a mode, and what it is fed."""
    task = SMALL[name]()
    program = normalise(task.model, batch=BATCH)
    trainable = select_trainable(program, "all")
    ranges = activation_ranges(program, Samples({"x": task.train.x}))
    recipe = Recipe(
        trainable,
        "softmax_cross_entropy",
        (mode, Mode.VJP),
        batch_statistics=False,
        estimator=spec,
        ranges=ranges,
    )
    feeds = {"x": task.train.x[:BATCH], "labels": task.train.labels[:BATCH]}
    cuts = [CutFinder(program, trainable).valid()[-1]]
    return compile_stages(program, cuts, recipe), feeds


@pytest.mark.parametrize("name", sorted(SMALL))
def test_training_and_evaluation_run_the_same_integers(name: str) -> None:
    bundles, feeds = two_stages(name)
    sent = train_pass(stages_of(bundles), feeds)
    exact = train_pass(stages_of(two_stages(name, mode=Mode.VJP)[0]), feeds)
    for value, found in sent.crossing.items():
        error = np.linalg.norm(found - exact.crossing[value])
        assert 0 < error < 0.1 * np.linalg.norm(exact.crossing[value])
    losses = evaluate(bundles, feeds)["loss"]
    assert sent.losses is not None
    np.testing.assert_allclose(sent.losses, losses, rtol=1e-5)


def test_onnx_runtime_puts_its_integer_kernels_in_place(tmp_path: Path) -> None:
    """All but the last, whose result leaves in float; values may be a step off."""
    (bundle, _), feeds = two_stages("small_cnn")
    data, spec = bundle.graphs[GraphName.FORWARD], bundle.manifest.graphs[GraphName.FORWARD]
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 4
    ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    assert sum(node.op_type == "QLinearConv" for node in nodes) == 2
    weights = {w.name: view(bundle.weights, w) for w in bundle.manifest.weights}
    plain = reference.run(onnx.load_from_string(data), {**feeds, **weights})
    fused = ENGINE.load(data, spec, {}).run({**feeds, **weights})
    for name, value in plain.items():
        assert np.abs(fused[name] - value).max() < 0.05 * np.abs(value).max()


def quantised_weights(bundle: Bundle, weights: Arrays, x: np.ndarray) -> Arrays:
    """The whole numbers that its forward makes of weights."""
    model = onnx.load_from_string(bundle.graphs[GraphName.FORWARD])
    names = [w.name for w in bundle.manifest.weights if w.lsb]
    found = reference.run(model, {"x": x, **weights}, [f"et/{n}/whole" for n in names])
    return {n: found[f"et/{n}/whole"].astype(int) for n in names}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_move_is_so_many_steps_to_either_side(name: str, count: int) -> None:
    """Up to the ends of the grid; what is said of it is half of what it is."""
    (bundle, _), feeds = two_stages(name)
    specs = [w for w in bundle.manifest.weights if w.lsb]
    assert specs
    weights = {w.name: view(bundle.weights, w).copy() for w in bundle.manifest.weights}
    for spec in specs:  # one at either end, two beyond
        flat = weights[spec.name].reshape(-1)
        ends = np.broadcast_to(spec.steps, spec.shape).reshape(-1)[:4]
        levels = np.array([HIGHEST, LOWEST, 1.5 * HIGHEST, 1.5 * LOWEST], np.float32)
        flat[:4] = ends * levels[: ends.size]
    still = quantised_weights(bundle, weights, feeds["x"])
    moves = {}
    for layer, spec in enumerate(specs):
        sign = signs(NoiseKey(0, 0, layer=layer), spec.shape)
        moves[spec.name] = sign, on_levels(weights[spec.name], spec.steps, sign, count)
    sides = [
        quantised_weights(bundle, {**weights, **moved}, feeds["x"])
        for moved in (
            {n: move.up for n, (_, move) in moves.items()},
            {n: move.down for n, (_, move) in moves.items()},
        )
    ]
    for spec in specs:
        sign, move = moves[spec.name]
        level = still[spec.name]
        for side, whole in zip((1, -1), (s[spec.name] for s in sides), strict=True):
            expected = np.clip(level + side * count * sign, LOWEST, HIGHEST)
            assert np.array_equal(whole, expected)
        half = (sides[0][spec.name] - sides[1][spec.name]) / 2
        np.testing.assert_allclose(move.by, half * spec.steps, rtol=1e-6)
        assert np.all(np.sign(half) == sign)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_estimates_point_along_the_exact_gradient(name: str) -> None:
    """Of the float net: nearly as well as floats would, and as far in the mean.

    The mean of N draws over P weights is expected at a cosine of sqrt(N / (N + P)).
    """
    draws = 600
    (bundle, _), feeds = two_stages(name)
    exact = train_pass(stages_of(two_stages(name, mode=Mode.VJP)[0]), feeds)
    (stage,) = stages_of([bundle])
    total = dict.fromkeys(estimated(bundle), np.float32(0))
    for step in range(draws):
        stage.parameters.begin_step()
        stage.forward(Tick(step, 0), {"x": feeds["x"]})
        stage.backward(Tick(step, 0), exact.cotangents[1])
        found = gradients(stage.parameters, bundle.manifest)
        total = {key: value + found[key] / draws for key, value in total.items()}
    ours, true = (
        np.concatenate([part[n].ravel() for n in total])
        for part in (total, exact.gradients)
    )
    cosine = ours @ true / np.linalg.norm(ours) / np.linalg.norm(true)
    assert cosine > 0.75 * np.sqrt(draws / (draws + ours.size))
    assert ours @ true == pytest.approx(true @ true, rel=0.2)


def estimated(bundle: Bundle) -> list[str]:
    """The trained weights whose gradient is not exact."""
    manifest = bundle.manifest
    exact = {
        port.key
        for segment in manifest.segments
        for port in manifest.graphs[segment.contract].ports(Role.GRADIENT)
    }
    return [w.name for w in manifest.weights if w.trainable and w.name not in exact]


def test_the_last_linear_op_s_gradient_is_of_what_the_integers_gave_it() -> None:
    """Its input is the rounded one, its own weights are the floats."""
    (bundle, _), feeds = two_stages("small_mlp")
    (stage,) = stages_of([bundle])
    stage.forward(Tick(0, 0), {"x": feeds["x"]})
    (sent,) = bundle.manifest.sends
    cotangent = normal(*sent.shape, seed=3)
    stage.backward(Tick(0, 0), {sent.name: cotangent})
    found = gradients(stage.parameters, bundle.manifest)
    weights = {w.name: view(bundle.weights, w) for w in bundle.manifest.weights}
    model = onnx.load_from_string(bundle.graphs[GraphName.FORWARD])
    seen = reference.run(model, {"x": feeds["x"], **weights}, ["et/relu2/restored"])
    x = seen["et/relu2/restored"]
    passed = x @ weights["fc3.weight"].T + weights["fc3.bias"] > 0
    exact = (cotangent * passed).T @ x
    np.testing.assert_allclose(found["fc3.weight"], exact, rtol=1e-4, atol=1e-6)


def test_the_cotangent_for_upstream_is_estimated_through_the_integers() -> None:
    task = SMALL["small_mlp"]()
    program = normalise(task.model, batch=BATCH)
    trainable = select_trainable(program, "all")
    found = CutFinder(program, trainable)
    cuts = [found.named(name) for name in task.cuts["middle"]]
    ranges = activation_ranges(program, Samples({"x": task.train.x}))
    feeds = {"x": task.train.x[:BATCH], "labels": task.train.labels[:BATCH]}
    loss = "softmax_cross_entropy"
    modes = (Mode.VJP, Mode.HYBRID, Mode.VJP)
    recipe = Recipe(trainable, loss, modes, estimator=QUANTISED, ranges=ranges)
    stages = stages_of(compile_stages(program, cuts, recipe))
    exact = train_pass(
        stages_of(compile_stages(program, cuts, Recipe(trainable, loss, (Mode.VJP,) * 3))),
        feeds,
    ).cotangents[1]["relu1"]
    total = np.zeros_like(exact)
    for step in range(600):
        total += train_pass(stages, feeds, Tick(step, 0)).cotangents[1]["relu1"]
    passed = stages[0].evaluate_forward({"x": feeds["x"]})["relu1"] > 0
    ours, true = (total * passed).ravel(), (exact * passed).ravel()
    assert ours @ true > 0.8 * np.linalg.norm(ours) * np.linalg.norm(true)
