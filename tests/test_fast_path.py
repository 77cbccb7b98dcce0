"""The engine's own kernels: taken only where they compute what the portable graphs do."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from small_models import build, normal
from stage_runs import ENGINE, OPTIMIZER

from edgetrain.bundle import Bundle
from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.trainable import select_trainable
from edgetrain.errors import EngineError
from edgetrain.manifest import FAST, Mode, view
from edgetrain.runtime.choice import choose
from edgetrain.runtime.engines import blocks
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.stage import Stage

WIDTH = 16
needs_blocks = pytest.mark.skipif(
    ENGINE.block != WIDTH, reason=f"this processor's blocks hold {ENGINE.block} channels"
)


def network(kernel=3, stride=1, dilation=1, image=12):
    """Dense, depthwise and dense convolutions with biases, and a head."""
    node = helper.make_node
    pads = [kernel // 2 * dilation] * 4
    window = {"pads": pads, "dilations": [dilation] * 2}
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1] * 4),
        node("Relu", ["c1"], ["r1"]),
        node("Conv", ["r1", "w2", "b2"], ["c2"], group=32, strides=[stride] * 2, **window),
        node("Relu", ["c2"], ["r2"]),
        node("Conv", ["r2", "w3"], ["c3"], pads=[1] * 4),
        node("GlobalAveragePool", ["c3"], ["p"]),
        node("Flatten", ["p"], ["y"]),
    ]
    tensors = {
        "w1": normal(32, 16, 3, 3, seed=1) / 12,
        "b1": normal(32, seed=2),
        "w2": normal(32, 1, kernel, kernel, seed=3),
        "b2": normal(32, seed=4),
        "w3": normal(16, 32, 3, 3, seed=5) / 17,
    }
    return build(nodes, [("x", ["N", 16, image, image])], ["y"], tensors)


def bundles(model, batch=8, stages=1, block=WIDTH, mode=Mode.VJP):
    program = normalise(model, batch=batch)
    trainable = select_trainable(program, "all")
    cuts = CutFinder(program, trainable).valid()[: stages - 1]
    recipe = Recipe(
        trainable,
        "softmax_cross_entropy",
        (mode,) * (stages - 1) + (Mode.VJP,),
        blocks=(block,) * stages,
    )
    return compile_stages(program, cuts, recipe)


def make(bundle: Bundle) -> Stage:
    return Stage(bundle, ENGINE, OPTIMIZER, microbatches=1, seed=0)


def step(stages, x, labels):
    values, tick = {"x": x}, Tick(0, 0)
    for stage in stages:
        values = stage.forward(tick, values)
    arriving = {"labels": labels}
    for stage in reversed(stages):
        arriving = stage.backward(tick, arriving).cotangents
    return {
        spec.name: view(stage.parameters.gradient, spec).copy()
        for stage in stages
        for spec in stage.manifest.weights
    }


@needs_blocks
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), [(3, 1, 1), (3, 2, 1), (5, 1, 1), (3, 1, 2)]
)
def test_the_fast_path_has_the_same_gradients(kernel, stride, dilation, stages):
    model = network(kernel, stride, dilation)
    portable = bundles(model, stages=stages)
    fast = [bundle.fast or bundle for bundle in portable]
    assert any(bundle.fast for bundle in portable)
    x, labels = normal(8, 16, 12, 12, seed=9), np.arange(8) % 16
    expected = step([make(b) for b in portable], x, labels)
    found = step([make(b) for b in fast], x, labels)
    for name, gradient in expected.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(found[name], gradient, atol=2e-5 * scale, err_msg=name)


@needs_blocks
@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.LOCAL, Mode.LOCAL_VJP])
def test_a_stage_that_gets_no_exact_cotangent_has_it_too(mode):
    first, _ = bundles(network(), stages=2, mode=mode)
    assert set(first.fast.graphs) == {
        g.removeprefix(FAST) for g in first.graphs if FAST in g
    }
    stage, _ = choose(first, ENGINE.block, make)
    assert stage.manifest.graphs in (first.manifest.graphs, first.fast.manifest.graphs)


def test_portable_graphs_use_onnx_alone_and_stay_in_the_bundle():
    (bundle,) = bundles(network())
    for name, data in bundle.graphs.items():
        model = onnx.load_from_string(data)
        domains = {node.domain for node in model.graph.node}
        assert (domains == {""}) == (not name.startswith(FAST))
    again = Bundle.decode(bundle.encode())
    assert again.manifest == bundle.manifest
    assert again.graphs == bundle.graphs


def test_a_model_with_nothing_to_gain_has_no_fast_path():
    (bundle,) = bundles(build(
        [helper.make_node("Gemm", ["x", "w"], ["y"])],
        [("x", ["N", 4])], ["y"], {"w": normal(4, 3)},
    ))  # fmt: skip
    assert bundle.manifest.fast is None
    assert bundle.fast is None


@needs_blocks
def test_wrong_blocks_are_noticed_and_not_used(caplog):
    """Graphs for blocks of 8 run here without an error, and compute something else."""
    (bundle,) = bundles(network(), batch=16, block=8)
    stage, _ = choose(bundle, 8, make)
    assert stage.manifest.graphs == bundle.manifest.graphs
    assert "computes something else" in caplog.text


def test_another_block_width_is_not_even_tried():
    (bundle,) = bundles(network())
    loads = itertools.count()

    def counted(version):
        next(loads)
        return make(version)

    choose(bundle, 0, counted)
    assert next(loads) == 1


def test_a_fast_path_that_does_not_run_is_left_alone():
    (bundle,) = bundles(network())
    broken = {n: b"" if n.startswith(FAST) else g for n, g in bundle.graphs.items()}
    stage, _ = choose(Bundle(bundle.manifest, broken, bundle.weights), WIDTH, make)
    assert stage.manifest.graphs == bundle.manifest.graphs


def test_the_probe_is_the_model_it_says_it_is():
    node = helper.make_node("ReorderInput", ["x"], ["y"], domain="com.microsoft.nchwc")
    infos = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, blocks.SHAPE) for n in "xy"
    ]
    graph = helper.make_graph([node], "p", infos[:1], infos[1:])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft.nchwc", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="")
    assert model.SerializeToString() == blocks.PROBE


@pytest.mark.parametrize(("order", "width"), [(8, 8), (16, 16), (1, 0), (64, 0)])
def test_the_width_is_read_off_the_reordered_values(order, width):
    class Reorders:
        def run(self, feeds):
            x = feeds["x"].reshape(64 // order, order, 2)
            return {"y": np.ascontiguousarray(x.transpose(0, 2, 1)).reshape(blocks.SHAPE)}

    assert blocks.block_width(lambda _graph, _spec: Reorders()) == width


def test_an_engine_without_the_layout_has_width_0():
    def refuses(_graph, _spec):
        raise EngineError("no such operator")

    assert blocks.block_width(refuses) == 0


def test_a_bundle_of_another_manifest_is_told_apart():
    (bundle,) = bundles(network())
    plain = msgspec.structs.replace(bundle.manifest, fast=None)
    assert plain.all_graphs.keys() < bundle.manifest.all_graphs.keys()
