"""Noise carried on to the loss: no bias, whatever the cut, and little comes back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgetrain.bundle import Bundle
from edgetrain.errors import PlanError
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.manifest import CARRYING, Mode, Role
from edgetrain.rays import Rays
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.memory_forecast import required_bytes
from edgetrain.runtime.stage import Stage
from tests.cut_models import BATCH, samples
from tests.stage_runs import (
    OPTIMIZER,
    Arrays,
    Pass,
    compiled,
    finder,
    stages_of,
    train_pass,
)

FG, SPSA = Mode.FORWARD_GRADIENT, Mode.SPSA
CUTS = ("t1", "t3")
CASES = {
    "activations": (FG, EstimatorSpec(1, control_variate=False)),
    "guided": (FG, EstimatorSpec(1)),
    "differences": (FG, EstimatorSpec(1, form="forward", control_variate=False)),
    "weights": (FG, EstimatorSpec(1, noise="weights")),
    "spsa": (SPSA, EstimatorSpec(1)),
}
REPEATS = 24  # of 64 draws: enough for the ratios to be known to a tenth
NETS = ("chain", "residual", "encoder", "stream", "tokens", "late_input")


def bundles_of(
    name: str, cuts: Sequence[str], mode: Mode, spec: EstimatorSpec
) -> list[Bundle]:
    places = [finder(name).named(cut) for cut in cuts]
    modes = [mode] * (len(places) + 1)
    return compiled(name, places, modes=modes, estimator=spec)


def stages(
    name: str, cuts: Sequence[str], mode: Mode, spec: EstimatorSpec, *, seed: int = 0
) -> list[Stage]:
    return stages_of(bundles_of(name, cuts, mode, spec), seed=seed)


def exact(name: str) -> Arrays:
    """The gradient, with the statistics that estimates use."""
    (stage,) = stages_of(compiled(name, frozen_statistics=True))
    return train_pass([stage], samples(name)).gradients


def joined(gradients: Arrays, names: Sequence[str]) -> np.ndarray:
    return np.concatenate([gradients[n].ravel().astype(np.float64) for n in names])


def drawn(case: str, draws: int) -> np.ndarray:
    """The errors of single draws of three stages' gradients."""
    mode, spec = CASES[case]
    made, true = stages("deep", CUTS, mode, spec), exact("deep")
    names, feeds = sorted(true), samples("deep")
    goal = joined(true, names)
    passes = (train_pass(made, feeds, Tick(step, 0)) for step in range(draws))
    return np.asarray([joined(done.gradients, names) - goal for done in passes])


def mean_square(errors: np.ndarray, draws: int) -> float:
    """Of the mean over so many draws, averaged over all groups of them."""
    means = errors.reshape(-1, draws, errors.shape[1]).mean(axis=1)
    return float(np.square(means).sum(axis=1).mean())


@pytest.mark.parametrize("case", CASES)
def test_the_mean_of_estimates_approaches_the_exact_as_one_over_n(case):
    """Four times the draws, a quarter of the squared error: there is no bias."""
    errors = drawn(case, 64 * REPEATS)
    assert 3 < mean_square(errors, 16) / mean_square(errors, 64) < 5.3


@pytest.mark.parametrize("case", ["activations", "differences", "spsa"])
@pytest.mark.parametrize("name", [*NETS, "turned"])
def test_estimates_point_downhill(name, case):
    """On real layers, many directions together lie close to the exact gradient."""
    mode, spec = CASES[case]
    spec = EstimatorSpec(800, form=spec.form, control_variate=False)
    trainable = "last:2" if mode is SPSA else "all"
    cut = finder(name, trainable).valid()[0]
    bundles = compiled(name, [cut], trainable=trainable, modes=[mode] * 2, estimator=spec)
    found = train_pass(stages_of(bundles), samples(name)).gradients
    true = exact(name)
    ours, goal = joined(found, sorted(found)), joined(true, sorted(found))
    assert ours @ goal > 0.7 * np.linalg.norm(ours) * np.linalg.norm(goal)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["deep", *NETS])
def test_the_cut_changes_nothing(name, case):
    """Three stages estimate what one does, by rounding if not to the bit."""
    mode, spec = CASES[case]
    spec = EstimatorSpec(2, noise=spec.noise, form=spec.form)
    cuts = finder(name).valid()[:2]
    one = stages(name, (), mode, spec)
    modes = [mode] * (len(cuts) + 1)
    more = stages_of(compiled(name, cuts, modes=modes, estimator=spec))
    for step in range(1 if spec.control_variate else 3):
        found, expected = (
            train_pass(made, samples(name, seed=step), Tick(step, 1)).gradients
            for made in (more, one)
        )
        assert found.keys() == expected.keys()
        for weight, gradient in expected.items():
            atol = 1e-5 * np.abs(gradient).max()
            np.testing.assert_allclose(found[weight], gradient, rtol=1e-5, atol=atol)


def test_samples_that_do_not_lead_every_tensor_are_estimated_together():
    """In the stages up to where they do not, each of which then gets one slope."""
    spec = EstimatorSpec(3)
    made = stages("turned", ("t0", "t2", "back"), FG, spec)
    done = train_pass(made, samples("turned"))
    shapes = [{n: a.shape for n, a in c.items()} for c in done.cotangents]
    assert shapes == [{}, {"slopes": (3, 1)}, {"slopes": (3, 1)}, shapes[3]]
    assert shapes[3].keys() == {"slopes", "error", "tangents"}


@pytest.mark.parametrize("case", CASES)
def test_the_last_linear_layer_is_exact(case):
    true = exact("deep")
    for seed in range(3):
        made = stages("deep", CUTS, *CASES[case], seed=seed)
        found = train_pass(made, samples("deep")).gradients
        for weight in ("w5", "b5"):
            scale = np.abs(true[weight]).max()
            np.testing.assert_allclose(found[weight], true[weight], atol=1e-5 * scale)
        assert not np.allclose(found["w4"], true["w4"], rtol=1e-2)


@pytest.mark.parametrize("case", CASES)
def test_the_seed_the_step_and_the_microbatch_name_the_noise(case):
    feeds = samples("deep")

    def passed(seed: int, tick: Tick) -> Pass:
        return train_pass(stages("deep", CUTS, *CASES[case], seed=seed), feeds, tick)

    one = passed(7, Tick(3, 1)).gradients
    again = passed(7, Tick(3, 1)).gradients
    assert all(np.array_equal(again[name], value) for name, value in one.items())
    for other in (
        passed(8, Tick(3, 1)),
        passed(7, Tick(2, 1)),
        passed(7, Tick(3, 0)),
    ):
        assert not np.allclose(other.gradients["w0"], one["w0"])


def test_guesses_take_most_of_the_noise_out():
    """Once they are learned; the first draws have none yet."""
    plain, guided = (drawn(case, 600)[300:] for case in ("activations", "guided"))
    assert mean_square(guided, 1) < 0.5 * mean_square(plain, 1)


@pytest.mark.parametrize("mode", [FG, SPSA])
def test_one_side_is_nearly_as_good_as_two(mode):
    form = "forward"
    one, two = (
        joined(
            train_pass(
                stages("deep", CUTS, mode, EstimatorSpec(4, form=form, sides=sides)),
                samples("deep"),
            ).gradients,
            [f"w{i}" for i in range(6)],
        )
        for sides in (1, 2)
    )
    assert not np.array_equal(one, two)
    assert np.linalg.norm(one - two) < 0.05 * np.linalg.norm(two)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["deep", "residual", "encoder"])
def test_the_manifest_predicts_the_stash_and_the_memory(name, case):
    cuts = finder(name).valid()[:2]
    mode, spec = CASES[case]
    bundles = compiled(name, cuts, modes=[mode] * 3, estimator=spec)
    made = stages_of(bundles)
    done = train_pass(made, samples(name))
    assert [bundle.manifest.stash_bytes for bundle in bundles] == done.stash_bytes
    for stage, bundle in zip(made, bundles, strict=True):
        needed = required_bytes(bundle.manifest, OPTIMIZER, 1)
        assert stage.memory_bytes + bundle.manifest.stash_bytes <= needed
    if bundles[0].manifest.estimator.noise == "weights":
        assert done.stash_bytes[:2] == [0, 0]  # a seed is enough
    else:
        received = [sum(s.nbytes for s in b.manifest.receives) for b in bundles]
        assert all(s <= r for s, r in zip(done.stash_bytes[:2], received[:2], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_little_comes_back(case):
    """4 K B bytes of slopes, and the loss's cotangent and tangents for guesses."""
    mode, spec = CASES[case]
    spec = EstimatorSpec(
        3, noise=spec.noise, form=spec.form, control_variate=spec.control_variate
    )
    done = train_pass(stages("deep", CUTS, mode, spec), samples("deep"))
    guesses = {"error": (BATCH, 5), "tangents": (3, BATCH, 5)}
    rows = 1 if case in ("weights", "spsa") else BATCH
    expected = {"slopes": (3, rows)} | (guesses if case == "guided" else {})
    for returned in done.cotangents[1:]:
        assert {name: array.shape for name, array in returned.items()} == expected
    assert done.cotangents[0] == {}


@pytest.mark.parametrize("case", CASES)
def test_no_graph_gives_a_cotangent_but_the_loss_s(case):
    for bundle in bundles_of("deep", CUTS, *CASES[case]):
        for name, spec in bundle.manifest.graphs.items():
            found = any(port.role is Role.COTANGENT for port in spec.outputs)
            assert found == (name == "criterion")


@pytest.mark.parametrize("mode", [FG, SPSA])
def test_where_nothing_is_estimated_nothing_is_carried(mode):
    """With the last layer alone, and behind frozen stages."""
    cuts = [finder("deep").named(name) for name in CUTS]
    head = compiled("deep", cuts, trainable="last:1", modes=[mode] * 3)
    assert all(b.manifest.rays == Rays() for b in head)
    done = train_pass(stages_of(head), samples("deep"))
    true = exact("deep")
    np.testing.assert_allclose(done.gradients["w5"], true["w5"], rtol=1e-4, atol=1e-6)
    bundles = compiled("deep", cuts, modes=[Mode.FROZEN, mode, mode])
    assert not bundles[1].manifest.rays.received
    assert not bundles[1].manifest.rays.slopes_out
    found = train_pass(stages_of(bundles), samples("deep")).gradients
    assert set(found) == {f"{kind}{i}" for kind in "wb" for i in range(2, 6)}


@pytest.mark.parametrize("mode", sorted(CARRYING))
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ((), Mode.VJP, "stage 0 trains by .* stage 1 after it is 'vjp' .* 'hybrid'"),
        ((), Mode.FROZEN, "stage 1 after it is 'frozen'"),
        ((Mode.VJP,), None, "stage 0 trains by 'vjp' and needs a cotangent, but stage 1"),
        ((Mode.HYBRID,), None, "stage 0 .* or 'frozen', or stage 1 'vjp' or 'hybrid'"),
    ],
)
def test_neighbours_that_cannot_work_together_are_refused(mode, before, after, message):
    modes = [*before, mode, after or mode]
    cuts = [finder("deep").named(name) for name in CUTS][: len(modes) - 1]
    with pytest.raises(PlanError, match=message):
        compiled("deep", cuts, modes=modes)
