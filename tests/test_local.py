"""Stages that learn from a head of their own: against differences, and against backprop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest

from edgetrain.bundle import Bundle
from edgetrain.compiler.head import LARGEST
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.errors import PlanError
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.manifest import DECOUPLED, HEAD, GraphName, Mode, Role
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.parameters import Parameters
from edgetrain.runtime.stage import Stage
from tests.cut_models import program, samples
from tests.stage_runs import (
    ENGINE,
    FIRST,
    Arrays,
    compiled,
    evaluate,
    finder,
    gradients,
    stages_of,
    train_pass,
    whole,
)

# A vector, a map that is pooled, tokens, a map with BatchNormalization.
ENDS = {"deep": "t2", "chain": "r1", "encoder": "n", "tokens": "r1", "residual": "r1"}
# What a head may ask of an engine.
PLAIN_OPS = {
    "Add", "Cast", "Div", "Equal", "Exp", "Expand", "LogSoftmax", "MatMul", "Mul", "Neg",
    "ReduceMean", "ReduceSum", "Reshape", "Sqrt", "Squeeze", "Sub", "Transpose",
    "Unsqueeze", "Identity",
}  # fmt: skip


def two(name: str, mode: Mode, spec: EstimatorSpec | None = None) -> list[Bundle]:
    """A model cut where a head can be, the first stage in that mode."""
    cut = finder(name).named(ENDS[name])
    return compiled(name, [cut], modes=[mode, Mode.VJP], estimator=spec or EstimatorSpec(1))


def received(bundle: Bundle, name: str) -> Arrays:
    feeds = samples(name)
    return {spec.name: feeds[spec.name] for spec in bundle.manifest.receives}


def head_run(bundle: Bundle, stage: Stage, end: np.ndarray, name: str) -> Arrays:
    """What the graph ``head`` gives, gradients included, by what each belongs to."""
    spec = bundle.manifest.graphs[GraphName.HEAD]
    graph = ENGINE.load(bundle.graphs[GraphName.HEAD], spec, {})
    held = stage.parameters.held(spec)
    results = graph.run({**held, ENDS[name]: end, "labels": samples(name)["labels"]})
    return {
        port.key if port.role in (Role.COTANGENT, Role.GRADIENT) else port.role: value
        for port in spec.outputs
        for value in [results[port.name]]
    }


@pytest.mark.parametrize("name", ENDS)
def test_local_vjp_equals_central_differences_of_the_head_s_loss(name):
    """Along random directions of all weights, those of the head among them."""
    bundle = two(name, Mode.LOCAL_VJP)[0]
    (stage,) = stages_of([bundle])
    labels = {"labels": samples(name)["labels"]}
    stage.forward(FIRST, received(bundle, name))
    stage.backward(FIRST, labels)
    gradient = stage.parameters.gradient.astype(np.float64)
    start = stage.parameters.weights.copy()
    for seed in range(5):
        rng = np.random.default_rng(seed)
        direction = rng.standard_normal(gradient.size).astype(np.float32)
        ends = []
        for sign in (1, -1):
            stage.parameters.weights[...] = start
            stage.parameters.trainable[...] += np.float32(sign * 5e-4) * direction
            end = stage.forward(Tick(1, seed), received(bundle, name))[ENDS[name]]
            loss = head_run(bundle, stage, end, name)[Role.LOSS]
            ends.append(loss.mean(dtype=np.float64))
            stage.backward(Tick(1, seed), labels)
        slope = (ends[0] - ends[1]) / 1e-3
        scale = np.linalg.norm(gradient) * np.sqrt(gradient.size) * 2e-3
        assert slope == pytest.approx(gradient @ direction, rel=2e-2, abs=scale)
    parts = gradients(stage.parameters, bundle.manifest)
    assert all(np.abs(part).max() > 0 for part in parts.values())


@pytest.mark.parametrize("name", ENDS)
def test_the_head_graph_gives_what_backprop_through_the_head_gives(name):
    """Its cotangent by differences, its gradients bit for bit as those of `local_vjp`."""
    bundle = two(name, Mode.LOCAL)[0]
    exact = two(name, Mode.LOCAL_VJP)[0]
    (stage,) = stages_of([bundle])
    end = stage.forward(FIRST, received(bundle, name))[ENDS[name]].copy()
    found = head_run(bundle, stage, end, name)
    cotangent = found[ENDS[name]].astype(np.float64)
    for seed in range(4):
        direction = np.random.default_rng(seed).standard_normal(end.shape)
        ahead, behind = (
            head_run(bundle, stage, (end + s * direction).astype(np.float32), name)
            for s in (1e-2, -1e-2)
        )
        slope = np.subtract(ahead[Role.LOSS], behind[Role.LOSS], dtype=np.float64).mean()
        expected = (cotangent * direction).sum()
        assert slope / 2e-2 == pytest.approx(expected, rel=2e-2, abs=1e-4)
    if name != "residual":  # whose batch statistics only the exact stage takes
        (other,) = stages_of([exact])
        for s in (stage, other):
            s.parameters.begin_step()
            s.forward(FIRST, received(bundle, name))
            s.backward(FIRST, {"labels": samples(name)["labels"]})
        ours, theirs = (gradients(s.parameters, s.manifest) for s in (stage, other))
        for weight in (f"{HEAD}0/weight", f"{HEAD}0/bias"):
            np.testing.assert_allclose(ours[weight], theirs[weight], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["deep", "chain", "tokens"])
def test_local_is_exact_in_the_last_layer_and_points_downhill_before(name):
    spec = EstimatorSpec(400, control_variate=False)
    feeds = samples(name)
    found, exact = (
        train_pass(stages_of(two(name, mode, spec)), feeds).gradients
        for mode in (Mode.LOCAL, Mode.LOCAL_VJP)
    )
    assert found.keys() == exact.keys()
    ours, true = (
        np.concatenate([part[n].ravel() for n in sorted(found)]) for part in (found, exact)
    )
    assert ours @ true > 0.7 * np.linalg.norm(ours) * np.linalg.norm(true)
    last = {"deep": "w2", "chain": "c1", "tokens": "w1"}[name]
    np.testing.assert_allclose(found[last], exact[last], rtol=1e-3, atol=1e-6)


def test_local_is_identity_where_the_stage_is_residual():
    cut = finder("stream").named("s2")
    modes = [Mode.LOCAL, Mode.VJP]
    bundle = compiled("stream", [cut], modes=modes)[0]
    assert bundle.manifest.inner is Mode.IDENTITY
    assert not any(segment.push for segment in bundle.manifest.segments)
    trained = {w.name for w in bundle.manifest.weights}
    assert trained == {"we", "wb0", "bb0", "wb1", "bb1", "head/0/weight", "head/0/bias"}
    exact = compiled("stream", [cut], modes=[Mode.LOCAL_VJP, Mode.VJP])
    feeds = samples("stream")
    found = train_pass(stages_of([bundle, exact[1]]), feeds).gradients
    true = train_pass(stages_of(exact), feeds).gradients
    for name in ("wb1", "bb1", "head/0/weight", "head/0/bias"):
        np.testing.assert_allclose(found[name], true[name], rtol=1e-3, atol=1e-6)
    assert two("deep", Mode.LOCAL)[0].manifest.inner is Mode.HYBRID


@pytest.mark.parametrize("noise", ["activations", "weights"])
@pytest.mark.parametrize("form", ["jvp", "forward"])
def test_local_learns_by_each_kind_of_noise(noise, form):
    """A few hundred steps on one batch bring the head's loss down."""
    spec = EstimatorSpec(noise=noise, form=form)
    bundle = two("deep", Mode.LOCAL, spec)[0]
    (stage,) = stages_of([bundle])
    labels = {"labels": samples("deep")["labels"]}
    losses = []
    for step in range(300):
        stage.parameters.begin_step()
        tick = Tick(step, 0)
        end = stage.forward(tick, received(bundle, "deep"))[ENDS["deep"]]
        losses.append(head_run(bundle, stage, end, "deep")[Role.LOSS].mean())
        stage.backward(tick, labels)
        stage.update(step)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("mode", sorted(DECOUPLED))
def test_nothing_of_the_stage_s_own_goes_up_or_comes_back(mode):
    cuts = [finder("deep").named(name) for name in ("t1", "t3")]
    bundles = compiled("deep", cuts, modes=[mode] * 3)
    for bundle in bundles:
        manifest = bundle.manifest
        assert manifest.cotangents_in == manifest.cotangents_out == ()
        assert manifest.labels is not None
        assert manifest.stash_bytes > 0 or manifest.is_last
        heads = [w for w in manifest.weights if w.name.startswith(HEAD)]
        assert len(heads) == (0 if manifest.is_last else 2)
    done = train_pass(stages_of(bundles), samples("deep"))
    assert done.cotangents == [{}, {}, {}]
    assert [b.manifest.stash_bytes for b in bundles] == done.stash_bytes
    exact = train_pass(stages_of(compiled("deep", cuts)), samples("deep"))
    np.testing.assert_allclose(done.gradients["w5"], exact.gradients["w5"], rtol=1e-5)


@pytest.mark.parametrize("mode", sorted(DECOUPLED))
def test_the_cotangent_of_what_passes_the_stage_is_handed_on(mode):
    """`r0` is read by the middle stage and passes it; that alone teaches the first."""
    cuts = [finder("residual").named(name) for name in ("r0", "r1")]
    bundles = compiled("residual", cuts, modes=[Mode.VJP, mode, Mode.VJP])
    assert [b.manifest.cotangents_in for b in bundles] == [("r0",), ("r0",), ()]
    done = train_pass(stages_of(bundles), samples("residual"))
    assert np.array_equal(done.cotangents[2]["r0"], done.cotangents[1]["r0"])
    assert np.abs(done.gradients["c0"]).max() > 0
    assert np.abs(done.gradients["c1"]).max() > 0


@pytest.mark.parametrize("mode", sorted(DECOUPLED))
@pytest.mark.parametrize("before", [Mode.VJP, Mode.HYBRID])
def test_a_stage_that_would_learn_nothing_is_refused(mode, before):
    cuts = [finder("deep").named(name) for name in ("t1", "t3")]
    with pytest.raises(PlanError, match=rf"stage 0 \({before}\).*stage 1 is {mode}"):
        compiled("deep", cuts, modes=[before, mode, Mode.VJP])
    compiled("deep", cuts, modes=[Mode.FROZEN, mode, Mode.VJP])
    compiled("deep", cuts, modes=[before, mode, Mode.VJP], trainable="last:3")


def test_a_stage_without_a_place_for_a_head_is_refused():
    """Of `turned`, only features come first in what crosses here."""
    cuts = [finder("turned").named("side"), finder("turned").named("t2")]
    modes = [Mode.FROZEN, Mode.LOCAL_VJP, Mode.VJP]
    with pytest.raises(PlanError, match="no place for a head"):
        compiled("turned", cuts, modes=modes)


@pytest.mark.parametrize("name", ENDS)
def test_a_head_is_plain_and_small(name):
    """No backward of anything but of products and of the normalisation."""
    bundle = two(name, Mode.LOCAL)[0]
    model = onnx.load_from_string(bundle.graphs[GraphName.HEAD])
    assert {node.op_type for node in model.graph.node} <= PLAIN_OPS
    weight = next(w for w in bundle.manifest.weights if w.name == f"{HEAD}0/weight")
    features = {"deep": 7, "chain": 4 * 16, "encoder": 3 * 8, "tokens": 4 * 8}
    assert weight.shape == (features.get(name, 4 * 16), 5)
    assert weight.elements <= LARGEST


@pytest.mark.parametrize("mode", sorted(DECOUPLED))
def test_heads_begin_alike_for_one_seed_and_leave_the_model_as_it_is(mode):
    cuts = [finder("deep").named(name) for name in ("t1", "t3")]

    def made(seed: int) -> Sequence[Bundle]:
        trained = frozenset(program("deep").weights)
        recipe = Recipe(trained, "softmax_cross_entropy", (mode,) * 3, seed=seed)
        return compile_stages(program("deep"), cuts, recipe)

    one, same, other = made(1), made(1), made(2)
    for a, b in zip(one, same, strict=True):
        assert a.encode() == b.encode()
    assert not np.array_equal(one[0].weights, other[0].weights)
    heads = [Parameters(b).held(b.manifest.graphs[GraphName.HEAD]) for b in one[:2]]
    assert not np.array_equal(
        *(h[f"{HEAD}{i}/weight"][:5, :5] for i, h in enumerate(heads))
    )
    feeds = samples("deep")
    outputs = evaluate(one, feeds)
    expected = whole(program("deep"), feeds)
    np.testing.assert_allclose(outputs["y"], expected["y"], rtol=1e-5, atol=1e-6)
