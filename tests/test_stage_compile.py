"""Splitting a model into stages changes no gradient, and each bundle keeps its word."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgetrain.bundle import Bundle
from edgetrain.compiler.build import Node as CompilerNode
from edgetrain.compiler.build import live_nodes
from edgetrain.compiler.stage import pick_output
from edgetrain.compiler.values import tensor_spec
from edgetrain.errors import GraphError
from edgetrain.manifest import DECOUPLED, GraphName, Mode, Role, view
from edgetrain.tensors import TensorSpec
from tests.cut_models import MODELS, program, samples
from tests.stage_runs import (
    FIRST,
    Pass,
    compiled,
    evaluate,
    finder,
    run_graph,
    stages_of,
    train_pass,
)

NAMES = sorted(MODELS)
BATCH_NORM = ["mobile", "residual"]


def assert_same(found: Pass, expected: Pass) -> None:
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5, atol=1e-6)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        scale = np.abs(gradient).max()
        assert scale > 0, name
        assert np.abs(found.gradients[name] - gradient).max() < 2e-5 * scale, name


def one_stage(name: str, trainable="all") -> Pass:
    stages = stages_of(compiled(name, trainable=trainable))
    return train_pass(stages, samples(name))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_any_stages_are_those_of_one(name):
    expected = one_stage(name)
    cuts = finder(name).valid()
    for count in {1, len(cuts)}:
        for chosen in itertools.combinations(cuts, count):
            stages = stages_of(compiled(name, chosen))
            assert_same(train_pass(stages, samples(name)), expected)


@pytest.mark.parametrize("position", range(1, 16))
def test_a_cut_through_attention_changes_no_gradient(position):
    cut = finder("encoder").at(position)
    stages = stages_of(compiled("encoder", [cut]))
    assert_same(train_pass(stages, samples("encoder")), one_stage("encoder"))


@pytest.mark.parametrize("trainable", ["last:1", "last:2", (r"[cw]\d?",), (r"c\d?|n0\.s",)])
@pytest.mark.parametrize("name", ["chain", "residual"])
def test_frozen_weights_change_no_other_gradient(name, trainable):
    expected = one_stage(name, trainable)
    cuts = finder(name, trainable).valid()
    for count in (1, len(cuts)):
        for chosen in itertools.combinations(cuts, count):
            stages = stages_of(compiled(name, chosen, trainable=trainable))
            assert_same(train_pass(stages, samples(name)), expected)


@pytest.mark.parametrize("name", ["chain", "encoder", "tokens"])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_stage_hands_cotangents_on(name, frozen):
    """The others train as if its weights had been left out of `trainable`."""
    cuts = finder(name).valid()[:2]
    modes = [Mode.FROZEN if stage == frozen else Mode.VJP for stage in range(3)]
    bundles = compiled(name, cuts, modes=modes)
    assert not bundles[frozen].manifest.weights
    found = train_pass(stages_of(bundles), samples(name))
    full = train_pass(stages_of(compiled(name, cuts)), samples(name))
    assert found.gradients
    for weight, gradient in found.gradients.items():
        np.testing.assert_allclose(gradient, full.gradients[weight], rtol=1e-5, atol=1e-7)
    if frozen == 0:
        assert found.cotangents[1] == {}, "nothing upstream trains"


@pytest.mark.parametrize("name", NAMES)
def test_no_cotangent_is_sent_where_nothing_upstream_trains(name):
    cuts = finder(name).valid()
    bundles = compiled(name, cuts, trainable="last:1")
    for bundle in bundles:
        assert bundle.manifest.cotangents_in == bundle.manifest.cotangents_out == ()
    for bundle in bundles[:-1]:
        assert GraphName.BACKWARD not in bundle.manifest.graphs
        assert not any(True for _ in bundle.manifest.graphs["forward"].ports(Role.STASH))
    found = train_pass(stages_of(bundles), samples(name))
    assert found.stash_bytes[:-1] == [0] * len(cuts)
    assert len(found.gradients) == len(one_stage(name, "last:1").gradients)


def test_a_relay_is_not_the_graphs_business():
    """`r0` crosses both cuts of the skip connection; the middle stage also reads it."""
    found = finder("residual")
    inner = found.named("n1.y")
    bundles = compiled("residual", [found.named("r0"), inner])
    assert "r0" in {spec.name for spec in bundles[1].manifest.sends}
    made = {p.name for p in bundles[1].manifest.graphs["forward"].outputs}
    assert "r0" not in made
    assert_same(train_pass(stages_of(bundles), samples("residual")), one_stage("residual"))


def test_a_pure_relay_passes_a_tensor_and_its_cotangent_through():
    """The embedding `e` skips attention: a stage in between only hands it on."""
    found = finder("encoder")
    bundles = compiled("encoder", [found.named("v.heads"), found.named("mixed")])
    middle = bundles[1].manifest
    assert "e" in middle.cotangents_in
    assert "e" in middle.cotangents_out
    for spec in middle.graphs.values():
        assert not any(p.key == "e" for p in (*spec.inputs, *spec.outputs))
    done = train_pass(stages_of(bundles), samples("encoder"))
    assert done.cotangents[1]["e"] is done.cotangents[2]["e"]
    assert_same(done, one_stage("encoder"))


def test_an_output_that_the_loss_ignores_gets_no_cotangent():
    bundles = compiled("early_output", finder("early_output").valid())
    assert [spec.name for spec in bundles[2].manifest.receives] == ["first", "r2"]
    assert bundles[2].manifest.cotangents_out == ("r2",)


@pytest.mark.parametrize("name", NAMES)
def test_the_stash_holds_what_backward_reads_and_no_more(name):
    cuts = finder(name).valid()
    bundles = compiled(name, cuts)
    done = train_pass(stages_of(bundles), samples(name))
    for bundle, stash_bytes in zip(bundles, done.stash_bytes, strict=True):
        graph = GraphName.LOSS if bundle.manifest.is_last else GraphName.BACKWARD
        spec = bundle.manifest.graphs[graph]
        read = [p for p in spec.inputs if p.role in (Role.STASH, Role.ACTIVATION)]
        sizes = [np.dtype(p.dtype).itemsize * int(np.prod(p.shape)) for p in read]
        assert stash_bytes == sum(sizes) > 0


def graphs_of(bundle: Bundle):
    for name, data in bundle.graphs.items():
        yield bundle.manifest.graphs[name], onnx.load_from_string(data)


def assert_consistent(bundle: Bundle) -> None:
    for spec, model in graphs_of(bundle):
        onnx.checker.check_model(model, full_check=True)
        for ports, infos in (
            (spec.inputs, model.graph.input),
            (spec.outputs, model.graph.output),
        ):
            told = [(p.name, p.dtype, p.shape) for p in ports]
            assert not [n for n, count in Counter(t[0] for t in told).items() if count > 1]
            infos = [tensor_spec(info) for info in infos]
            assert told == [(i.name, i.dtype, i.shape) for i in infos]
        nodes = [CompilerNode.from_proto(proto) for proto in model.graph.node]
        outputs = {p.name for p in spec.outputs}
        assert len(live_nodes(nodes, outputs)) == len(nodes), "dead nodes"
        read = {i for n in nodes for i in n.inputs}
        assert read >= {p.name for p in spec.inputs}, "an input nobody reads"
        assert read >= {t.name for t in model.graph.initializer}, "an unused constant"


def assert_ports_resolve(bundle: Bundle) -> None:
    """Every port's key is a thing the manifest knows."""
    manifest = bundle.manifest
    weights = {spec.name: spec for spec in manifest.weights}
    crossing = {spec.name: spec for spec in (*manifest.receives, *manifest.sends)}
    for spec in manifest.graphs.values():
        for role in (Role.WEIGHT, Role.GRADIENT):
            for port in spec.ports(role):
                assert port.shape == weights[port.key].shape
                assert weights[port.key].trainable or role is Role.WEIGHT
        for port in spec.ports(Role.ACTIVATION):
            known = crossing.get(port.key)
            assert known is None or (port.dtype, port.shape) == (known.dtype, known.shape)
    running = [name for s in manifest.statistics for name in (s.mean, s.variance)]
    assert set(running) == {n for n, spec in weights.items() if not spec.trainable}


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("name", NAMES)
def test_the_manifest_says_what_the_graphs_are(name, mode):
    cuts = finder(name).valid()
    if name == "turned" and mode in DECOUPLED:
        cuts = cuts[:2]  # where features lead there is no place for a head
    for chosen in ((), cuts[:1], cuts):
        bundles = compiled(name, chosen, modes=[mode] * (len(chosen) + 1))
        for one, other in itertools.pairwise(bundles):
            assert one.manifest.sends == other.manifest.receives
            assert one.manifest.cotangents_in == other.manifest.cotangents_out
        for bundle in bundles:
            assert_consistent(bundle)
            assert_ports_resolve(bundle)
        held = [spec.name for bundle in bundles for spec in bundle.manifest.weights]
        assert len(held) == len(set(held))


@pytest.mark.parametrize("name", NAMES)
def test_the_flat_buffer_holds_the_files_weights(name):
    for bundle in compiled(name, finder(name).valid()):
        for spec in bundle.manifest.weights:
            expected = program(name).weights[spec.name]
            assert np.array_equal(view(bundle.weights, spec), expected)


def test_only_what_trains_or_moves_is_an_input():
    """Frozen weights are constants of the graphs, whatever the mode of the stage."""
    for bundle in compiled("chain", finder("chain").valid(), trainable="last:1"):
        names = {spec.name for spec in bundle.manifest.weights}
        assert names == ({"w4", "b4"} if bundle.manifest.is_last else set())
        for _, model in graphs_of(bundle):
            held = {t.name for t in model.graph.initializer}
            assert held.isdisjoint({"w4", "b4"})


def test_an_input_that_is_also_a_result_gets_a_name_of_its_own():
    """The cotangents of both terms of a sum are one value: two ports, two names."""
    cut = finder("residual").named("n2.y")
    last = compiled("residual", [cut])[1].manifest
    ports = list(last.graphs["loss"].ports(Role.COTANGENT))
    assert {p.key for p in ports} == {"n2.y", "r0"}
    assert len({p.name for p in ports}) == 2


@pytest.mark.parametrize("name", BATCH_NORM)
def test_batch_norm_reports_the_statistics_of_its_microbatch(name):
    """Mean and biased variance of its input, over all axes but the channel's."""
    cut = finder(name).named("h1")
    (bundle, _) = compiled(name, [cut])
    feeds = {"x": samples(name)["x"]}
    spec = bundle.manifest.graphs["forward"]
    found = run_graph(bundle, GraphName.FORWARD, feeds)
    by_key = {p.key: found[p.name] for p in spec.ports(Role.STATISTIC)}
    first = compiled(name, [finder(name).named("h0")])[0]
    h0 = run_graph(first, GraphName.FORWARD, feeds)["h0"]
    np.testing.assert_allclose(by_key["n0.m"], h0.mean((0, 2, 3)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(by_key["n0.v"], h0.var((0, 2, 3)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("split", [False, True])
def test_running_statistics_follow_the_formula(split):
    """running = 0.8 running + 0.2 batch, its variance unbiased; the last stage's too."""
    name = "residual"
    cuts = [finder(name).named("r1")] if split else []
    stages = stages_of(compiled(name, cuts))
    train_pass(stages, samples(name))
    head = compiled(name, [finder(name).named("h0")])[0]
    h0 = run_graph(head, GraphName.FORWARD, {"x": samples(name)["x"]})["h0"]
    count = h0.size // h0.shape[1]
    batch = {"n0.m": h0.mean((0, 2, 3)), "n0.v": h0.var((0, 2, 3)) * count / (count - 1)}
    for key, value in batch.items():
        expected = 0.8 * program(name).weights[key] + 0.2 * value
        found = view(stages[0].parameters.weights, stages[0].parameters.spec(key))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    (described,) = [s for s in stages[0].manifest.statistics if s.mean == "n0.m"]
    assert described.count == count
    assert described.momentum == pytest.approx(0.8)


@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.FROZEN])
def test_other_modes_leave_the_running_statistics_alone(mode):
    cuts = finder("residual").valid()[:1]
    bundles = compiled("residual", cuts, modes=[mode, Mode.VJP])
    assert bundles[0].manifest.statistics == ()
    assert bundles[1].manifest.statistics
    for spec in bundles[0].manifest.graphs.values():
        assert not any(True for _ in spec.ports(Role.STATISTIC))


def learns_exactly(bundle: Bundle) -> set[str]:
    """The weights whose gradient a perturbed stage has exactly."""
    (exact,) = (segment for segment in bundle.manifest.segments if segment.exact)
    contract = bundle.manifest.graphs[exact.contract]
    return {port.key for port in contract.ports(Role.GRADIENT)}


@pytest.mark.parametrize(
    ("name", "exact"),
    [("chain", {"w4", "b4"}), ("encoder", {"wh", "bh"}), ("residual", {"w", "b"})],
)
def test_a_hybrid_stage_has_the_exact_gradient_of_its_last_linear_op(name, exact):
    (bundle,) = compiled(name, modes=[Mode.HYBRID])
    assert learns_exactly(bundle) == exact
    assert not {GraphName.BACKWARD, GraphName.LOSS} & set(bundle.graphs)


def test_a_prepared_weight_counts_as_its_op_s_own():
    """MatMul with a Transpose of the weight is a linear op with weights."""
    cut = finder("encoder").named("gelu")
    bundle = compiled("encoder", [cut], modes=[Mode.HYBRID, Mode.VJP])[0]
    assert learns_exactly(bundle) == {"wf1", "bf1"}
    last = {"wh", "bh", "wf2", "l2.s", "l2.b"}
    weights = compiled("encoder", trainable="last:2")[0].manifest.weights
    assert {spec.name for spec in weights} == last


def test_hybrid_asks_for_no_cotangent_it_would_not_get():
    """`first` crosses all cuts as an output, but the loss does not depend on it there."""
    cuts = finder("early_output").valid()
    modes = [Mode.VJP, Mode.HYBRID, Mode.VJP]
    bundles = compiled("early_output", cuts, modes=modes)
    assert bundles[1].manifest.cotangents_in == ("r2",)
    modes = [Mode.VJP, Mode.VJP, Mode.HYBRID]
    bundles = compiled("early_output", cuts, modes=modes)
    assert bundles[2].manifest.cotangents_out == ("r2",)
    assert set(train_pass(stages_of(bundles), samples("early_output")).gradients)


def test_accuracy_is_of_the_output_that_the_loss_applies_to():
    """Both outputs have the labels' shape; `first` does not count."""
    (bundle,) = compiled("early_output")
    assert [spec.name for spec in bundle.manifest.outputs] == ["y", "first"]
    (stage,) = stages_of([bundle])
    feeds = samples("early_output")
    outputs = run_graph(bundle, GraphName.EVALUATE, feeds)
    result = stage.evaluate_loss({"x": feeds["x"]}, outputs["y"].argmax(axis=1))
    assert result.hits.tolist() == [1, 1, 1, 1]
    assert (outputs["first"].argmax(axis=1) != outputs["y"].argmax(axis=1)).any()


def test_fused_and_split_give_the_same_cotangent():
    """What `loss` sends upstream is what a later cut's `backward` hands on."""
    cuts = finder("chain").valid()
    fused = train_pass(stages_of(compiled("chain", cuts[:1])), samples("chain"))
    split = train_pass(stages_of(compiled("chain", cuts[:2])), samples("chain"))
    one, other = fused.cotangents[1]["p1"], split.cotangents[1]["p1"]
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-8)


def test_a_second_microbatch_does_not_see_the_first():
    stages = stages_of(compiled("chain", finder("chain").valid()))
    train_pass(stages, samples("chain", seed=5))
    assert_same(train_pass(stages, samples("chain"), FIRST), one_stage("chain"))


def test_the_graphs_are_plain_onnx_of_opset_20():
    for bundle in compiled("encoder", finder("encoder").valid()):
        for _, model in graphs_of(bundle):
            assert [(o.domain, o.version) for o in model.opset_import] == [("", 20)]
            for tensor in model.graph.initializer:
                assert numpy_helper.to_array(tensor).dtype != np.float64
            assert model.producer_name == "edgetrain"


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("name", ["chain", "encoder", "mobile"])
def test_training_and_evaluation_give_the_loss_of_the_formula(name):
    """`mobile` ends with the Softmax that cross entropy contains: it counts once."""
    feeds = samples(name)
    found = evaluate(compiled(name), feeds)
    log_p = np.log(found["y"]) if name == "mobile" else log_softmax(found["y"])
    expected = -log_p[np.arange(len(log_p)), feeds["labels"]]
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-4, atol=1e-6)
    if name != "mobile":  # in training its BatchNormalization uses other statistics
        (stage,) = stages_of(compiled(name))
        trained = train_pass([stage], feeds).losses
        np.testing.assert_allclose(trained, expected, rtol=1e-4, atol=1e-6)


def test_a_regression_compares_with_the_models_own_output():
    (bundle,) = compiled("mobile", loss="mse")
    assert bundle.manifest.labels == TensorSpec("labels", "float32", (4, 5))
    labels = np.zeros((4, 5), np.float32)
    found = evaluate([bundle], samples("mobile") | {"labels": labels})
    np.testing.assert_allclose(found["loss"], (found["y"] ** 2).mean(axis=1), rtol=1e-5)
    (stage,) = stages_of([bundle])
    assert stage.evaluate_loss({"x": samples("mobile")["x"]}, labels).hits is None


def test_of_several_outputs_one_must_be_named():
    made = program("early_output")
    assert pick_output(made, "first").name == "first"
    with pytest.raises(GraphError, match=r"several outputs \(first, y\)"):
        pick_output(made, "")
    with pytest.raises(GraphError, match="'q': the outputs are first, y"):
        pick_output(made, "q")
