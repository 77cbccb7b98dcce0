"""A run that moves between two steps ends with the weights of one that stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest

from coordinator.deployed import Deployed
from coordinator.fleet import Fleet
from coordinator.job import Job
from coordinator.metrics import METRICS_FILE, MoveMetrics, read_lines
from coordinator.pipeline_loop import PipelineLoop, Score
from coordinator.plan_run import planner_of
from coordinator.rollout import Rollout
from coordinator.tally import StepTotal, Tally
from coordinator.weights import Weights
from edgetrain.compiler.normalise import normalise
from edgetrain.runtime.outbox import Outbox
from edgetrain.sim.fleet import SimDevice, ThreadFleet
from edgetrain.stage_state import ModelState
from edgetrain.transport.memory import MemoryHub, MemoryTransport
from edgetrain.wire.topics import COORDINATOR
from tests.plan_task import chain_job, write_chain

NAMES = ("a", "b", "c")
STEPS = 8
TRAIN = {"steps": STEPS, "lr": 0.01, "microbatches": 4, "lr_schedule": "cosine"}
ADAM = {**TRAIN, "optimizer": "adam", "lr": 0.001}
WAIT_S = 30.0


class Nobody:
    """Looks on and does nothing."""

    def stepped(self, total: StepTotal, tally: Tally) -> None:
        pass

    def evaluated(self, step: int, score: Score) -> None:
        pass


@contextmanager
def three_devices() -> Iterator[MemoryHub]:
    hub = MemoryHub()
    devices = [SimDevice(name, memory_bytes=1 << 30) for name in NAMES]
    with ThreadFleet(lambda name: MemoryTransport(hub, name), devices):
        yield hub


class Run:
    """A run that is told by hand which plan to be in."""

    def __init__(self, folder: Path, hub: MemoryHub, train: dict) -> None:
        self._folder, self._train = folder, train
        transport = MemoryTransport(hub, COORDINATOR)
        self.fleet = Fleet(transport)
        self.outbox = Outbox(
            transport, self.fleet.inbox, lambda _: None, self.fleet.undelivered
        )
        self.fleet.open()
        self.hellos = self.fleet.wait(NAMES, len(NAMES), WAIT_S)
        self.rollout = Rollout(self._job(), self.fleet, self.outbox, 7, clock=lambda: 0.0)
        self.supply = self.rollout.supply(self.hellos)

    def _job(self, **sections: dict) -> Job:
        fleet = {"devices": list(NAMES)}
        return chain_job(self._folder, train=self._train, fleet=fleet, **sections)

    def deploy(self, plan: dict, state: ModelState | None = None) -> Deployed:
        planner = planner_of(self._job(**plan), self.hellos)
        draft = self.rollout.draft(planner.assign())
        return self.rollout.deploy(draft, self.supply, STEPS, state)

    def weights(self, plans: dict[int, dict]) -> Weights:
        """Train under these plans, each from its step on."""
        loop: PipelineLoop | None = None
        for step in range(STEPS):
            if step not in plans:
                continue
            if loop is None:
                pipeline = self.rollout.pipeline(self.deploy(plans[step]), self.supply)
                loop = PipelineLoop(self.fleet, pipeline, Nobody(), lambda: False)
            else:
                loop.train_until(step)
                deployed = self.deploy(plans[step], loop.state())
                loop.move(self.rollout.pipeline(deployed, self.supply))
        assert loop is not None
        loop.train_until(STEPS)
        found = loop.weights()
        self.rollout.release()
        self.outbox.close()
        self.fleet.close()
        return found


def pinned(*names: str, stages: int | None = None) -> dict:
    pin = {"first": names[0], "last": names[-1]}
    return {"plan": {"pin": pin, "stages": stages or len(names)}}


PLANS = {
    "elsewhere": {0: pinned("a", "b"), 3: pinned("b", "c")},
    "fewer": {0: pinned("a", "b", "c"), 3: pinned("b", stages=1)},
    "more": {0: pinned("a", stages=1), 5: pinned("b", "c", "a", stages=3)},
    "twice": {0: pinned("a", "b"), 2: pinned("c", "a"), 6: pinned("a", "b")},
    "both ends": {0: pinned("a", "b"), 3: pinned("a", "a", stages=3)},
}


@pytest.mark.parametrize("train", [TRAIN, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("plans", list(PLANS.values()), ids=list(PLANS))
def test_moving_changes_no_weight(tmp_path, plans, train):
    with three_devices() as hub:
        stayed = Run(tmp_path, hub, train).weights({0: plans[0]})
        moved = Run(tmp_path, hub, train).weights(plans)
    assert moved.keys() == stayed.keys()
    for name, value in stayed.items():
        error = np.linalg.norm(moved[name] - value)
        assert error <= 1e-6 * np.linalg.norm(value), name


def table(**plan: object) -> dict:
    return {
        "model": {"path": "chain.onnx"},
        "data": {"train": "train.npz"},
        "train": {"batch_size": 64, "steps": 70, "lr": 0.005, "microbatches": 4},
        "plan": {"stages": "all", **plan},
    }


def test_a_device_that_slows_down_loses_layers_and_no_weight_is_lost(
    edgetrain_fleet, tmp_path
):
    write_chain(tmp_path)
    slows = [{"at_s": 0.5, "speed": 0.02}]
    disturbed = [SimDevice("a", speed=0.2), SimDevice("b", speed=0.2, timetable=slows)]
    moved = edgetrain_fleet(disturbed).train(table())
    moves = read_lines(moved.folder / METRICS_FILE, MoveMetrics)
    assert moves
    assert all(move.moved_s < move.stayed_s for move in moves)
    assert "Moves" in (moved.folder / "report.html").read_text()
    calm = [SimDevice("c"), SimDevice("d")]
    stayed = edgetrain_fleet(calm).train(table(replan=False))
    assert not read_lines(stayed.folder / METRICS_FILE, MoveMetrics)
    found = normalise(onnx.load(moved.model), batch=1).weights
    for name, value in normalise(onnx.load(stayed.model), batch=1).weights.items():
        assert np.linalg.norm(found[name] - value) <= 1e-6 * np.linalg.norm(value), name


@pytest.mark.parametrize("options", [{"replan": False}, {"cuts": ["r3"]}])
def test_a_run_that_is_not_to_move_stays(edgetrain_fleet, tmp_path, options):
    write_chain(tmp_path)
    slows = [{"at_s": 0.2, "speed": 0.05}]
    devices = [SimDevice("a", speed=0.5), SimDevice("b", speed=0.5, timetable=slows)]
    run = table(**options)
    run["train"] |= {"steps": 25}
    if "cuts" in options:
        del run["plan"]["stages"]
    outcome = edgetrain_fleet(devices).train(run)
    assert not read_lines(outcome.folder / METRICS_FILE, MoveMetrics)
