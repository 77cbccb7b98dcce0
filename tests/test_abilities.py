"""What an engine is found to run, and what a narrowed one refuses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import ability_models
import numpy as np
import pytest

from device_agent.equip import Limits, equip
from edgetrain.abilities import ABILITIES, BACKWARD, JVP, WEIGHTS
from edgetrain.errors import EngineError
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.manifest import GraphSpec, Mode
from edgetrain.runtime.engines import abilities as probes
from edgetrain.runtime.engines.abilities import abilities
from edgetrain.runtime.engines.base import Engine, LoadedGraph
from edgetrain.runtime.stage import Stage
from edgetrain.sim.device import NarrowedEngine
from tests.stage_runs import ENGINE, OPTIMIZER, compiled, finder


@pytest.mark.parametrize(
    ("data", "model"),
    [
        (probes.BACKWARD_MODEL, ability_models.backward),
        (probes.JVP_MODEL, ability_models.jvp),
        (probes.WEIGHTS_MODEL, ability_models.weights),
    ],
)
def test_the_bytes_are_the_models_they_say_they_are(data, model):
    assert data == model()


def test_the_engine_at_hand_runs_everything():
    assert abilities(ENGINE) == ABILITIES
    assert equip("here", Limits()).hello.runs == ABILITIES


@pytest.mark.parametrize(
    "kept", [c for n in range(3) for c in itertools.combinations(ABILITIES, n)]
)
def test_an_engine_that_refuses_is_found_out(kept):
    assert abilities(NarrowedEngine(ENGINE, kept)) == kept
    assert equip("there", Limits(runs=kept)).hello.runs == kept


class _Wrong:
    """Computes, but not quite right."""

    name = "wrong"

    def __init__(self, graph: LoadedGraph | None = None) -> None:
        self._graph = graph

    def load(
        self, graph: bytes, spec: GraphSpec, held: Mapping[str, np.ndarray]
    ) -> LoadedGraph:
        return _Wrong(ENGINE.load(graph, spec, held))  # type: ignore[return-value] # a fake

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert self._graph is not None
        return {name: 1.1 * value for name, value in self._graph.run(feeds).items()}


def test_wrong_numbers_are_no_ability():
    assert abilities(_Wrong()) == ()


def stage(mode: Mode, engine: Engine, place: int, form: str = "jvp") -> Stage:
    modes = [Mode.VJP] * 3
    modes[place] = mode
    cuts = [finder("deep").named(name) for name in ("t1", "t3")]
    spec = EstimatorSpec(1, form=form)
    bundle = compiled("deep", cuts, modes=modes, estimator=spec)[place]
    return Stage(bundle, engine, OPTIMIZER, microbatches=1, seed=0)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_plain_inference_is_enough_for_a_hybrid_stage_and_not_for_an_exact_one(place):
    plain = NarrowedEngine(ENGINE, [WEIGHTS])
    stage(Mode.HYBRID, plain, place, "forward").warm_up()
    with pytest.raises(EngineError, match="runs no backward graphs"):
        stage(Mode.VJP, plain, place)
    if place:
        with pytest.raises(EngineError, match="runs no backward graphs"):
            stage(Mode.FROZEN, plain, place)
    with pytest.raises(EngineError, match="runs no jvp graphs"):
        stage(Mode.HYBRID, plain, place)
    stage(Mode.HYBRID, NarrowedEngine(ENGINE, [WEIGHTS, JVP]), place).warm_up()
    stage(Mode.VJP, NarrowedEngine(ENGINE, [WEIGHTS, BACKWARD]), place).warm_up()


def test_constants_alone_are_enough_for_a_first_frozen_stage():
    stage(Mode.FROZEN, NarrowedEngine(ENGINE, []), 0).warm_up()
