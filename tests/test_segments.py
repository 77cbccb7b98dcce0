"""A stage run segment by segment: the laws that tie pushing to contracting."""

from __future__ import annotations

import numpy as np
import pytest

from edgetrain.bundle import Bundle
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.manifest import Mode
from edgetrain.runtime.estimators.cone import felt
from edgetrain.runtime.estimators.segments import Segments
from edgetrain.runtime.parameters import Parameters
from edgetrain.segment import Unit
from tests.cut_models import samples
from tests.stage_runs import (
    ENGINE,
    Arrays,
    compiled,
    finder,
    gradients,
    stages_of,
    train_pass,
)

NETS = ("deep", "chain", "stream", "encoder")


def first_stage(name: str, mode: Mode, form: str = "jvp") -> tuple[list[Bundle], Arrays]:
    """All but a net's last layer as a stage of the mode, and what it receives."""
    cut = finder(name).valid()[-1]
    spec = EstimatorSpec(form=form)
    bundles = compiled(name, [cut], modes=[mode, Mode.VJP], estimator=spec)
    feeds = samples(name)
    return bundles, {s.name: feeds[s.name] for s in bundles[0].manifest.receives}


def drawn(unit: Unit) -> np.ndarray:
    rng = np.random.default_rng(len(unit.name))
    return rng.standard_normal(unit.shape).astype(np.float32)


@pytest.mark.parametrize("name", NETS)
def test_a_pushed_tangent_is_what_a_small_move_does(name):
    """The forward-mode graph against central differences of the plain form."""
    bundles, received = first_stage(name, Mode.HYBRID)
    segments = Segments(bundles[0], ENGINE, Parameters(bundles[0]))
    plain, _ = first_stage(name, Mode.HYBRID, "forward")
    moved = Segments(plain[0], ENGINE, Parameters(plain[0]))
    size = np.float32(1e-3)
    ahead, behind = (
        moved.push(received, lambda u, s=s: s * drawn(u), {}).values for s in (size, -size)
    )
    tangents = segments.push(received, drawn, {}).tangents
    assert tangents
    for end, tangent in tangents.items():
        slope = (ahead[end] - behind[end]) / (2 * size)
        assert np.linalg.norm(slope - tangent) < 2e-2 * np.linalg.norm(tangent)


@pytest.mark.parametrize("name", NETS)
def test_pushing_and_contracting_are_adjoint(name):
    """JVP(v) . c = <v, VJP(c)>: unit vectors pushed give the cotangents backprop has.

    Contracted, they give the whole exact gradient.
    """
    bundles, received = first_stage(name, Mode.HYBRID)
    exact = stages_of(first_stage(name, Mode.VJP)[0])
    ends = train_pass(exact, samples(name)).cotangents[1]
    parameters = Parameters(bundles[0])
    segments = Segments(bundles[0], ENGINE, parameters)
    cotangents = _slopes(segments, received, ends)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        noise = {u.name: rng.standard_normal(u.shape, np.float32) for u in segments.units}
        tangents = segments.push(received, lambda u, n=noise: n[u.name], {}).tangents
        pushed = sum(float((ends[n] * t).sum()) for n, t in tangents.items())
        pulled = sum(float((noise[n] * c).sum()) for n, c in cotangents.items())
        sizes = (
            np.linalg.norm(noise[n]) * np.linalg.norm(c) for n, c in cotangents.items()
        )
        assert pushed == pytest.approx(pulled, abs=1e-5 * float(sum(sizes)))
    segments.contract(received, lambda u: cotangents[u.name], ends)
    parameters.accumulate()
    found = gradients(parameters, bundles[0].manifest)
    for weight, gradient in train_pass(exact, samples(name)).gradients.items():
        if weight in found:
            scale = np.abs(gradient).max() + 1e-6
            np.testing.assert_allclose(found[weight], gradient, atol=1e-4 * scale)


def _slopes(segments: Segments, received: Arrays, ends: Arrays) -> Arrays:
    """The cotangent of each unit, one push of a unit vector for each of its elements."""
    found = {}
    for unit in segments.units:
        cotangent = np.zeros(unit.shape, np.float32)
        for place in np.ndindex(unit.shape):
            noise = np.zeros(unit.shape, np.float32)
            noise[place] = 1

            def one(
                other: Unit, unit: Unit = unit, noise: np.ndarray = noise
            ) -> np.ndarray:
                zeros = np.zeros(other.shape, np.float32)
                return noise if other.name == unit.name else zeros

            tangents = segments.push(received, one, {}).tangents
            pairs = [(ends[n] * t).sum() for n, t in tangents.items() if n in ends]
            cotangent[place] = sum(pairs)
        found[unit.name] = cotangent
    return found


@pytest.mark.parametrize("name", ["chain", "mobile", "encoder"])
def test_a_cone_holds_every_place_that_feels_a_change(name):
    """And nothing outside of it moves, whatever place is changed."""
    for cut in finder(name).valid():
        modes = [Mode.HYBRID, Mode.VJP]
        bundle = compiled(name, [cut], modes=modes)[0]
        feeds = samples(name)
        received = {s.name: feeds[s.name] for s in bundle.manifest.receives}
        segments = Segments(bundle, ENGINE, Parameters(bundle))
        for unit in segments.units:
            if unit.cone:
                _check_cone(segments, unit, received)


def _check_cone(segments: Segments, unit: Unit, received: Arrays) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        place = tuple(int(rng.integers(n)) for n in unit.shape)
        noise = np.zeros(unit.shape, np.float32)
        noise[place] = 1

        def one(other: Unit, noise: np.ndarray = noise) -> np.ndarray:
            zeros = np.zeros(other.shape, np.float32)
            return noise if other.name == unit.name else zeros

        tangents = segments.push(received, one, {}).tangents
        (tangent,) = tangents.values()
        sums = np.broadcast_to(felt(unit, np.abs(tangent)), unit.shape)
        assert sums[place] == pytest.approx(np.abs(tangent).sum(), rel=1e-5)


def test_identity_trains_the_branches_and_hands_the_cotangent_on():
    """Exact for the last branch; the others take the end's cotangent for their own."""
    cuts = [finder("stream").named("s0"), finder("stream").named("s2")]
    modes = [Mode.VJP, Mode.IDENTITY, Mode.VJP]
    stages = stages_of(compiled("stream", cuts, modes=modes))
    exact = train_pass(stages_of(compiled("stream", cuts)), samples("stream"))
    found = train_pass(stages, samples("stream"))
    assert {w.name for w in stages[1].manifest.weights} == {"wb0", "bb0", "wb1", "bb1"}
    for name in ("wb1", "bb1"):
        np.testing.assert_allclose(found.gradients[name], exact.gradients[name], rtol=1e-4)
    end = found.cotangents[2]["s2"]
    np.testing.assert_array_equal(found.cotangents[1]["s0"], end)
    np.testing.assert_allclose(found.gradients["bb0"], end.sum((0, 1)), rtol=1e-5)
    angle = (found.gradients["we"] * exact.gradients["we"]).sum()
    sizes = [np.linalg.norm(p.gradients["we"]) for p in (found, exact)]
    assert angle > 0.5 * np.prod(sizes)


def test_a_stage_of_several_ends_has_no_stream():
    """So nothing in it learns by identity, and the rest of the model does."""
    cuts = [finder("turned").named("t0"), finder("turned").named("t2")]
    assert len(cuts[1].crossing) == 2
    modes = [Mode.FROZEN, Mode.IDENTITY, Mode.VJP]
    stages = stages_of(compiled("turned", cuts, modes=modes))
    found = train_pass(stages, samples("turned"))
    assert not stages[1].manifest.trainable_elements
    assert found.gradients.keys() == {
        w.name for w in stages[2].manifest.weights if w.trainable
    }
