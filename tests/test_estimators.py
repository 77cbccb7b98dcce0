"""Exact gradients against differences, estimated ones against the exact."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest

from edgetrain.bundle import Bundle
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.manifest import GraphName, GraphSpec, Mode, Role
from edgetrain.runtime.engines.base import LoadedGraph
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.estimators.hybrid import Hybrid
from edgetrain.runtime.parameters import Parameters
from edgetrain.runtime.stage import Stage
from tests.cut_models import samples
from tests.stage_runs import (
    ENGINE,
    FIRST,
    compiled,
    difference,
    finder,
    gradients,
    mean_square,
    stages_of,
    train_pass,
)

CUTS = ("t1", "t3")
PLAIN = EstimatorSpec(control_variate=False)
SPECS = {
    "activations": EstimatorSpec(1, control_variate=False),
    "guided": EstimatorSpec(1),
    "differences": EstimatorSpec(1, form="forward"),
    "weights": EstimatorSpec(1, noise="weights"),
}
REPEATS = 24  # of 64 draws: enough for the ratios to be known to a tenth


def bundles_of(hybrid: int | None = None, spec: EstimatorSpec = PLAIN) -> list[Bundle]:
    """Three stages of two dense layers each, one of them perhaps perturbed."""
    cuts = [finder("deep").named(name) for name in CUTS]
    modes = [Mode.HYBRID if stage == hybrid else Mode.VJP for stage in range(3)]
    return compiled("deep", cuts, modes=modes, estimator=spec)


def deep(
    hybrid: int | None = None, spec: EstimatorSpec = PLAIN, *, seed: int = 0
) -> list[Stage]:
    return stages_of(bundles_of(hybrid, spec), seed=seed)


@pytest.mark.parametrize("name", ["deep", "late_input", "encoder"])
def test_backprop_equals_central_differences(name):
    """Along random directions of all weights, of the mean loss."""
    feeds = samples(name)
    (stage,) = stages_of(compiled(name))
    train_pass([stage], feeds)
    gradient = stage.parameters.gradient.astype(np.float64)
    start = stage.parameters.weights.copy()
    inputs = {spec.name: feeds[spec.name] for spec in stage.manifest.receives}
    for seed in range(6):
        direction = np.random.default_rng(seed).standard_normal(gradient.size)
        direction = direction.astype(np.float32)
        ends = []
        for sign in (1, -1):
            stage.parameters.weights[...] = start
            stage.parameters.trainable[...] += np.float32(sign * 1e-2) * direction
            losses = stage.evaluate_loss(inputs, feeds["labels"]).losses
            ends.append(losses.mean(dtype=np.float64))
        slope = (ends[0] - ends[1]) / 2e-2
        scale = np.linalg.norm(gradient) * np.sqrt(gradient.size) * 1e-3
        assert slope == pytest.approx(gradient @ direction, rel=1e-2, abs=scale)


@cache
def drawn(position: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The errors of many single draws: of a stage's gradients, and of its cotangents."""
    stages = deep(position)
    feeds = samples("deep")
    exact = train_pass(deep(), feeds)
    values = {"x": feeds["x"]}
    for stage in stages[:position]:
        values = stage.forward(FIRST, values)
    arriving = {"labels": feeds["labels"]}
    if position < 2:
        arriving = exact.cotangents[position + 1]
    bundle = bundles_of(position, SPECS[kind])[position]
    parameters = Parameters(bundle)
    hybrid = Hybrid(bundle, ENGINE, parameters, 0)
    rows: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for step in range(64 * REPEATS):
        parameters.begin_step()
        hybrid.forward(Tick(step, 0), values)
        cotangents = hybrid.backward(Tick(step, 0), arriving).cotangents
        found = gradients(parameters, bundle.manifest)
        rows[0].append(difference(found, exact.gradients))
        rows[1].append(difference(cotangents, exact.cotangents[position]))
    return np.asarray(rows[0]), np.asarray(rows[1])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("position", "kind"), [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1)])
def test_the_mean_of_estimates_approaches_the_exact_as_one_over_n(spec, position, kind):
    """Four times the draws, a quarter of the squared error: there is no bias.

    Kind 0 are the gradients of a first, middle and last stage, 1 the cotangents they send.
    """
    errors = drawn(position, spec)[kind]
    assert 3 < mean_square(errors, 16) / mean_square(errors, 64) < 5.3


@pytest.mark.parametrize(("position", "last"), [(0, "1"), (1, "3"), (2, "5")])
def test_the_last_linear_op_s_gradient_is_exact(position, last):
    """As exact as the cotangent that arrives, whatever is drawn."""
    exact = train_pass(deep(), samples("deep")).gradients
    for seed in range(3):
        found = train_pass(deep(position, seed=seed), samples("deep")).gradients
        for name in (f"w{last}", f"b{last}"):
            scale = np.abs(exact[name]).max()
            np.testing.assert_allclose(found[name], exact[name], atol=1e-5 * scale)


def test_an_estimate_is_only_that():
    """The other layers' gradients differ from draw to draw."""
    one, other = (
        train_pass(deep(1, seed=seed), samples("deep")).gradients for seed in (1, 2)
    )
    assert not np.allclose(one["w2"], other["w2"])
    assert np.array_equal(one["w3"], other["w3"])


@pytest.mark.parametrize("name", ["chain", "encoder", "turned", "tokens"])
def test_estimates_point_downhill(name):
    """On real layers, many tangents together lie close to the exact direction."""
    cut = finder(name).valid()[1]
    spec = EstimatorSpec(400, control_variate=False)
    bundles = compiled(name, [cut], modes=[Mode.HYBRID, Mode.VJP], estimator=spec)
    parameters = Parameters(bundles[0])
    hybrid = Hybrid(bundles[0], ENGINE, parameters, 0)
    last = stages_of(bundles)[1]
    feeds = samples(name)
    inputs = {spec.name: feeds[spec.name] for spec in bundles[0].manifest.receives}
    last.forward(FIRST, hybrid.forward(FIRST, inputs))
    hybrid.backward(FIRST, last.backward(FIRST, {"labels": feeds["labels"]}).cotangents)
    found = gradients(parameters, bundles[0].manifest)
    exact = train_pass(stages_of(compiled(name, [cut])), feeds).gradients
    ours, true = (
        np.concatenate([part[n].ravel() for n in sorted(found)]) for part in (found, exact)
    )
    assert ours @ true > 0.7 * np.linalg.norm(ours) * np.linalg.norm(true)


def test_samples_that_do_not_lead_every_tensor_are_estimated_together():
    """Of the two tensors that come back one leads with features; still no bias."""
    cuts = [finder("turned").named("t0"), finder("turned").named("t2")]
    assert {spec.shape[0] for spec in cuts[1].crossing} == {4, 8}
    exact = train_pass(stages_of(compiled("turned", cuts)), samples("turned"))
    modes = [Mode.VJP, Mode.HYBRID, Mode.VJP]
    stages = stages_of(compiled("turned", cuts, modes=modes, estimator=PLAIN))
    total = np.zeros((4, 8))
    draws = 1600
    for step in range(draws):
        found = train_pass(stages, samples("turned"), Tick(step, 0))
        total += found.cotangents[1]["t0"]
    true = exact.cotangents[1]["t0"]
    assert np.linalg.norm(total / draws - true) < 0.3 * np.linalg.norm(true)


class RecordingEngine:
    """Remembers which graphs it was given."""

    name = "recording"

    def __init__(self, names: Mapping[bytes, str]) -> None:
        self._names = names
        self.loaded: list[str] = []

    def load(
        self, graph: bytes, spec: GraphSpec, held: Mapping[str, np.ndarray]
    ) -> LoadedGraph:
        self.loaded.append(self._names[graph])
        return ENGINE.load(graph, spec, held)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_hybrid_never_runs_a_backward_graph(position):
    """What it loads beside the forward is one layer's contraction and the loss."""
    bundle = bundles_of(position)[position]
    engine = RecordingEngine({data: name for name, data in bundle.graphs.items()})
    Hybrid(bundle, engine, Parameters(bundle), 0)
    last = {GraphName.CRITERION} if position == 2 else set()
    segments = {f"{n}/{graph}" for n in range(2) for graph in ("push", "contract")}
    assert set(engine.loaded) == {GraphName.FORWARD} | segments | last
    for name in segments:
        spec = bundle.manifest.graphs[name]
        assert not any(p.role is Role.COTANGENT for p in spec.outputs)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_same_seed_gives_the_same_bits_and_another_does_not(position):
    feeds = samples("deep")
    one, same, other = (
        train_pass(deep(position, seed=seed), feeds, Tick(3, 1)) for seed in (7, 7, 8)
    )
    differs = False
    for name, gradient in one.gradients.items():
        assert np.array_equal(gradient, same.gradients[name])
        differs |= not np.array_equal(gradient, other.gradients[name])
    for name, cotangent in one.cotangents[position].items():
        assert np.array_equal(cotangent, same.cotangents[position][name])
        differs |= not np.array_equal(cotangent, other.cotangents[position][name])
    assert differs


@pytest.mark.parametrize("tick", [Tick(1, 0), Tick(0, 1)])
def test_every_microbatch_is_perturbed_afresh(tick):
    stages = deep(1)
    one = train_pass(stages, samples("deep"), FIRST).gradients["w2"]
    assert not np.allclose(one, train_pass(stages, samples("deep"), tick).gradients["w2"])


@pytest.mark.parametrize("hybrid", [None, 0, 1])
def test_ticks_in_any_order_give_the_same(hybrid):
    """Forwards and backwards of several microbatches, interleaved at random.

    Without a control variate, which learns from each microbatch in turn.
    """
    ticks = [Tick(2, m) for m in range(5)]
    expected = in_order(deep(hybrid)[:2], ticks, ticks)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        forwards, backwards = ([ticks[i] for i in rng.permutation(5)] for _ in range(2))
        found = in_order(deep(hybrid)[:2], forwards, backwards)
        for tick in ticks:
            for name, value in expected[tick].items():
                assert np.array_equal(value, found[tick][name]), (tick, name)


def in_order(
    stages: list[Stage], forwards: list[Tick], backwards: list[Tick]
) -> dict[Tick, dict[str, np.ndarray]]:
    """What each microbatch adds to the gradients of two stages that get cotangents."""
    added: dict[Tick, dict[str, np.ndarray]] = {}
    for tick in forwards:
        values = {"x": samples("deep", seed=tick.microbatch)["x"]}
        for stage in stages:
            values = stage.forward(tick, values)
    peak = [stage.stash_bytes for stage in stages]
    for tick in backwards:
        rng = np.random.default_rng(tick.microbatch)
        arriving = {"t3": rng.standard_normal((4, 8)).astype(np.float32)}
        added[tick] = {}
        for stage in reversed(stages):
            stage.parameters.begin_step()
            arriving = stage.backward(tick, arriving).cotangents
            added[tick] |= gradients(stage.parameters, stage.manifest)
    assert all(size % len(forwards) == 0 and size > 0 for size in peak)
    assert [stage.stash_bytes for stage in stages] == [0, 0]
    return added
