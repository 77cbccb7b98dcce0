"""A stage's warm-up, its memory, its update, and the manifests it refuses."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from edgetrain.errors import BundleError
from edgetrain.manifest import DECOUPLED, GraphName, Mode, Role, view
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.complete import check_complete
from edgetrain.runtime.memory_forecast import required_bytes
from edgetrain.runtime.parameters import COMMITS_KEPT, RUN_AHEAD, Parameters, commits_kept
from edgetrain.runtime.stage import Stage
from tests.cut_models import samples
from tests.stage_runs import (
    ENGINE,
    FIRST,
    OPTIMIZER,
    compiled,
    finder,
    stages_of,
    train_pass,
)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("name", ["residual", "tokens", "deep"])
def test_the_warm_up_leaves_no_trace(name, mode):
    """Neither in the weights, nor in running statistics, gradients or the stash."""
    cuts = finder(name).valid()[:2]
    for bundle in compiled(name, cuts, modes=[mode] * 3):
        (stage,) = stages_of([bundle])
        timing = stage.warm_up().timing
        assert timing.forward_s >= 0
        assert timing.backward_s >= 0
        assert np.array_equal(stage.parameters.weights, bundle.weights)
        assert not stage.parameters.gradient.any()
        assert stage.stash_bytes == 0
        assert np.array_equal(stage.parameters.committed(-1), bundle.weights)


def test_a_warmed_up_stage_trains_as_a_cold_one():
    cold, warm = stages_of(compiled("residual")), stages_of(compiled("residual"))
    warm[0].warm_up()
    for _ in range(2):
        for stages in (cold, warm):
            train_pass(stages, samples("residual"))
            stages[0].update(0)
    assert np.array_equal(cold[0].parameters.weights, warm[0].parameters.weights)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_an_update_takes_the_mean_over_microbatches(microbatches):
    (bundle,) = compiled("deep")
    stage = Stage(bundle, ENGINE, OPTIMIZER, microbatches=microbatches, seed=0)
    total = np.zeros_like(stage.parameters.gradient)
    stage.parameters.begin_step()
    for m in range(microbatches):
        (other,) = stages_of([bundle])
        feeds = samples("deep", m)
        train_pass([other], feeds)
        total += other.parameters.gradient
        tick = FIRST._replace(microbatch=m)
        stage.forward(tick, {"x": feeds["x"]})
        stage.backward(tick, {"labels": feeds["labels"]})
    mean = total / microbatches
    assert stage.square_sum() == pytest.approx(float(np.square(mean).sum()), rel=1e-5)
    stage.update(0)
    expected = bundle.weights - np.float32(OPTIMIZER.lr.base) * mean
    np.testing.assert_allclose(stage.parameters.weights, expected, atol=1e-6)


def test_commits_are_kept_and_forgotten():
    (bundle,) = compiled("deep")
    parameters = Parameters(bundle)
    trainable = parameters.trainable
    for step in range(5):
        before = parameters.open_commit()
        before[...] = trainable
        trainable[...] = step
        parameters.close_commit(step)
    kept = [step for step in range(-1, 6) if parameters.committed(step) is not None]
    assert kept == [4 - n for n in reversed(range(COMMITS_KEPT))]
    for step in kept:
        assert (parameters.committed(step)[: trainable.size] == step).all()


def test_a_commit_holds_the_running_statistics_of_its_own_step():
    (bundle,) = compiled("residual")
    (stage,) = stages_of([bundle])
    assert bundle.manifest.statistics
    commits = {-1: bundle.weights.copy()}
    for step in range(3):
        train_pass([stage], samples("residual", step))
        stage.update(step)
        commits[step] = stage.parameters.weights.copy()
        for kept in (step - 1, step):
            assert np.array_equal(stage.parameters.committed(kept), commits[kept])
    train_pass([stage], samples("residual", 9))
    assert np.array_equal(stage.parameters.committed(2), commits[2])
    assert not np.array_equal(stage.parameters.weights, commits[2])


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (OptimizerSpec("sgd", LRSpec(0.1)), 0),
        (OptimizerSpec("sgd", LRSpec(0.1), momentum=0.9), 1),
        (OptimizerSpec("adam", LRSpec(0.1)), 2),
    ],
)
@pytest.mark.parametrize("mode", [Mode.VJP, Mode.HYBRID, Mode.LOCAL_VJP, Mode.LOCAL])
def test_the_memory_asked_for_is_what_is_allocated(optimizer, states, mode):
    """Weights, commits, gradient, scratch, optimizer state, and a stash a microbatch."""
    cut = finder("deep").named("t2")
    bundle = compiled("deep", [cut], modes=[mode, Mode.VJP])[0]
    manifest = bundle.manifest
    copies = commits_kept(manifest)
    assert copies == COMMITS_KEPT + (RUN_AHEAD if mode in DECOUPLED else 0)
    trained = 2 + states + (mode is not Mode.VJP)  # a copy of the deployed weights
    buffers = copies * manifest.elements + trained * manifest.trainable_elements
    crossing = sum(s.nbytes for s in (*manifest.receives, *manifest.sends))
    none = required_bytes(manifest, optimizer, 0)
    assert none > 4 * buffers + crossing
    one = required_bytes(manifest, optimizer, 1) - none
    assert required_bytes(manifest, optimizer, 5) == none + 5 * one
    stage = Stage(bundle, ENGINE, optimizer, microbatches=1, seed=0)
    stage.forward(FIRST, {"x": samples("deep")["x"]})
    assert one == stage.stash_bytes + crossing > crossing
    for step in range(copies):
        stage.update(step)
    assert 0 <= 4 * buffers + stage.stash_bytes - stage.memory_bytes < 64


def test_only_a_stage_that_nothing_holds_back_needs_more_commits():
    bundles = compiled("deep", finder("deep").valid()[:2], trainable="last:1")
    kept = [commits_kept(bundle.manifest) for bundle in bundles]
    assert kept == [COMMITS_KEPT + RUN_AHEAD] * 2 + [COMMITS_KEPT]
    bundles = compiled("deep", finder("deep").valid()[:2], modes=[Mode.LOCAL_VJP] * 3)
    assert [commits_kept(bundle.manifest) for bundle in bundles] == kept
    bundles = compiled("deep", finder("deep").valid()[:2])
    assert {commits_kept(bundle.manifest) for bundle in bundles} == {COMMITS_KEPT}


@pytest.mark.parametrize(
    ("mode", "missing", "words"),
    [
        (Mode.VJP, GraphName.EVALUATE, "no graph 'evaluate'"),
        (Mode.VJP, GraphName.LOSS, "no loss"),
        (Mode.HYBRID, GraphName.FORWARD, "no graph 'forward'"),
        (Mode.HYBRID, GraphName.CRITERION, "no loss"),
    ],
)
def test_a_manifest_without_its_graphs_is_refused(mode, missing, words):
    (bundle,) = compiled("deep", modes=[mode])
    check_complete(bundle.manifest)
    graphs = {n: g for n, g in bundle.manifest.graphs.items() if n != missing}
    with pytest.raises(BundleError, match=words):
        check_complete(msgspec.structs.replace(bundle.manifest, graphs=graphs))


@pytest.mark.parametrize("mode", sorted(DECOUPLED))
def test_a_stage_that_should_have_a_head_is_refused_without_one(mode):
    cut = finder("deep").named("t2")
    manifest = compiled("deep", [cut], modes=[mode, Mode.VJP])[0].manifest
    check_complete(manifest)
    graphs = {n: g for n, g in manifest.graphs.items() if n != GraphName.HEAD}
    for change in ({"graphs": graphs}, {"labels": None}):
        with pytest.raises(BundleError, match="no graph 'head'"):
            check_complete(msgspec.structs.replace(manifest, **change))


def test_graphs_read_the_weights_and_write_the_gradients_where_they_are():
    (bundle,) = compiled("deep")
    parameters = Parameters(bundle)
    held = parameters.held(bundle.manifest.graphs[GraphName.LOSS])
    for port in bundle.manifest.graphs[GraphName.LOSS].ports(Role.GRADIENT):
        assert np.shares_memory(held[port.name], parameters.scratch)
        assert np.shares_memory(held[port.key], parameters.weights)
        shape = view(parameters.weights, parameters.spec(port.key)).shape
        assert held[port.name].shape == held[port.key].shape == shape
