"""The mean of estimates approaches the exact gradient, on nets of every kind."""

from __future__ import annotations

import numpy as np
import pytest
from free_small import SMALL

from edgetrain.bundle import Bundle
from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.trainable import select_trainable
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.manifest import CARRYING, Mode
from edgetrain.runtime.estimators.base import Tick
from tests.stage_runs import (
    Arrays,
    difference,
    gradients,
    mean_square,
    stages_of,
    train_pass,
)

BATCH = 4
GROUPS = 10  # of 64 draws
SPECS = {
    "activations": EstimatorSpec(1, control_variate=False),
    "guided": EstimatorSpec(1),
    "differences": EstimatorSpec(1, control_variate=False, form="forward"),
    "weights": EstimatorSpec(1, noise="weights"),
}


def two_stages(name: str, mode: Mode, spec: EstimatorSpec) -> tuple[list[Bundle], Arrays]:
    """All but the last layer of a small net in a mode, and what it is fed."""
    task = SMALL[name]()
    program = normalise(task.model, batch=BATCH)
    trainable = select_trainable(program, "all")
    cuts = [CutFinder(program, trainable).valid()[-1]]
    recipe = Recipe(
        trainable,
        "softmax_cross_entropy",
        (mode, mode if mode in CARRYING else Mode.VJP),
        batch_statistics=False,
        estimator=spec,
    )
    feeds = {"x": task.train.x[:BATCH], "labels": task.train.labels[:BATCH]}
    return compile_stages(program, cuts, recipe), feeds


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", sorted(SMALL.keys() - {"small_mobilenet_1d"}))
def test_four_times_the_draws_make_a_quarter_of_the_squared_error(name, spec):
    exact, feeds = two_stages(name, Mode.VJP, SPECS[spec])
    done = train_pass(stages_of(exact), feeds)
    (bundle, _), _ = two_stages(name, Mode.HYBRID, SPECS[spec])
    (stage,) = stages_of([bundle])
    own = {w.name for w in bundle.manifest.weights}
    true = {name: g for name, g in done.gradients.items() if name in own}
    errors = []
    for step in range(64 * GROUPS):
        stage.parameters.begin_step()
        stage.forward(Tick(step, 0), {"x": feeds["x"]})
        stage.backward(Tick(step, 0), done.cotangents[1])
        errors.append(difference(gradients(stage.parameters, bundle.manifest), true))
    rows = np.asarray(errors)
    assert 3 < mean_square(rows, 16) / mean_square(rows, 64) < 5.3


CARRIED = {
    "tangents": (Mode.FORWARD_GRADIENT, EstimatorSpec(1, control_variate=False)),
    "guided": (Mode.FORWARD_GRADIENT, EstimatorSpec(1)),
    "losses": (Mode.SPSA, EstimatorSpec(1)),
}


@pytest.mark.parametrize("way", CARRIED)
@pytest.mark.parametrize("name", sorted(SMALL.keys() - {"small_mobilenet_1d"}))
def test_so_it_is_where_noise_is_carried_to_the_loss(name, way):
    mode, spec = CARRIED[way]
    exact, feeds = two_stages(name, Mode.VJP, spec)
    true = train_pass(stages_of(exact), feeds).gradients
    bundles, _ = two_stages(name, mode, spec)
    stages = stages_of(bundles)
    errors = [
        difference(train_pass(stages, feeds, Tick(step, 0)).gradients, true)
        for step in range(64 * GROUPS)
    ]
    rows = np.asarray(errors)
    assert 3 < mean_square(rows, 16) / mean_square(rows, 64) < 5.3
