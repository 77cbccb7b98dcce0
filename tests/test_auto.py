"""Runs whose gradient modes are chosen, on devices that refuse what they do not run."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from cut_models import MODELS
from small_task import blobs, run_table, write_small_task
from training import metrics, train, weights_of

from coordinator.job import prepare
from coordinator.pretrained import is_pretrained
from coordinator.progress import SilentProgress
from coordinator.watch import Watch
from edgetrain.abilities import BACKWARD, JVP, WEIGHTS
from edgetrain.compiler.nature import natures
from edgetrain.config import RunConfig, parse
from edgetrain.errors import PlanError
from edgetrain.plan import Plan
from edgetrain.sim.fleet import SimDevice
from tests.cut_models import program
from tests.stage_runs import finder

PLAIN, PUSHING = (WEIGHTS,), (WEIGHTS, JVP)


@pytest.fixture
def task(tmp_path):
    """The small task's files, and how to make a run file of them."""
    write_small_task(tmp_path)

    def config(**sections: object) -> RunConfig:
        table = run_table()
        for name, section in sections.items():
            table[name] = {**table.get(name, {}), **section}
        return parse(table, folder=tmp_path)

    return config


def two(first=(BACKWARD, JVP, WEIGHTS), last=(BACKWARD, JVP, WEIGHTS)):
    return [SimDevice("one", runs=first), SimDevice("two", runs=last)]


def pinned(task, **sections):
    plan = {"cuts": ["r"], "pin": {"first": "one", "last": "two"}}
    return task(plan=plan, fleet={"devices": ["one", "two"]}, **sections)


def plan_of(outcome) -> Plan:
    return Plan.decode((outcome.folder / "plan.json").read_bytes())


@pytest.mark.parametrize(
    ("first", "mode"),
    [((BACKWARD, WEIGHTS), "vjp"), (PUSHING, "hybrid"), (PLAIN, "hybrid"), ((), "frozen")],
)
def test_a_device_gets_the_mode_that_its_engine_runs(task, tmp_path, first, mode):
    """It would refuse any other: its engine raises an error for those graphs."""
    outcome = train(pinned(task), tmp_path / "run", two(first))
    stage = plan_of(outcome).stages[0]
    assert stage.mode == mode
    assert stage.reason in (outcome.folder / "report.html").read_text()
    assert outcome.rows[0].reason == stage.reason
    assert outcome.score.accuracy > (0.5 if mode == "frozen" else 0.9)
    start, end = weights_of(tmp_path / "m.onnx"), weights_of(outcome.model)
    assert np.array_equal(start["w1"], end["w1"]) == (mode == "frozen")


def test_a_last_stage_may_be_plain_inference(task, tmp_path):
    outcome = train(pinned(task), tmp_path / "run", two(last=PLAIN))
    assert [stage.mode for stage in plan_of(outcome).stages] == ["vjp", "hybrid"]
    assert outcome.score.accuracy > 0.9


def test_what_a_device_cannot_do_may_not_be_asked_of_it(task, tmp_path):
    config = pinned(task, train={"gradient": ["vjp", "auto"]})
    with pytest.raises(PlanError, match="'one', but its engine runs no backward graphs"):
        train(config, tmp_path / "run", two(PLAIN))


def test_the_reasons_are_shown_before_the_first_step(task, tmp_path):
    said = []

    class Listening(SilentProgress):
        def say(self, text: str) -> None:
            said.append((text, len(metrics(tmp_path / "run"))))

    train(pinned(task), tmp_path / "run", two(PLAIN), watch=Watch(Listening()))
    reason = (
        "one estimates its gradients from the exact cotangent that arrives: its engine runs"
        " no backward graphs"
    )
    assert (f"stage 0: hybrid; {reason}", 0) in said


def test_weights_that_know_the_task_are_told_from_weights_that_do_not(task, tmp_path):
    config = task(train={"lr_schedule": "cosine", "warmup_steps": 5})
    assert not is_pretrained(prepare(config))
    trained = train(config, tmp_path / "run", [SimDevice("one")])
    model = trained.model
    assert is_pretrained(prepare(task(model={"path": str(model)})))
    asked = {"path": str(model), "pretrained": False}
    assert not is_pretrained(prepare(task(model=asked)))
    assert is_pretrained(prepare(task(model={"pretrained": True})))
    assert is_pretrained(prepare(task(model={"source": "train.npz"})))


@pytest.mark.parametrize("loss", ["mse", "l1", "bce_with_logits"])
def test_any_loss_tells(task, tmp_path, loss):
    for name, count in (("train", 192), ("eval", 96)):
        data = blobs(count)
        labels = np.eye(3, dtype=np.float32)[data["labels"]]
        np.savez(tmp_path / f"{name}.npz", x=data["x"], labels=labels)
    config = task(model={"loss": loss}, train={"lr": 0.01})
    assert not is_pretrained(prepare(config))
    trained = train(config, tmp_path / "run", [SimDevice("one")])
    again = task(model={"loss": loss, "path": str(trained.model)})
    assert is_pretrained(prepare(again))


def test_a_pretrained_model_gets_no_estimated_cotangents(task, tmp_path):
    """Its residual stage in the middle hands the cotangent on as it is."""
    onnx.save(MODELS["stream"](), tmp_path / "m.onnx")
    inputs = program("stream").inputs
    rng = np.random.default_rng(0)
    arrays = {s.name: rng.standard_normal((64, *s.shape[1:]), np.float32) for s in inputs}
    for name in ("train", "eval"):
        np.savez(tmp_path / f"{name}.npz", **arrays, labels=rng.integers(0, 5, 64))
    plan = {"cuts": ["s0", "s2"], "pin": {"first": "one", "last": "three"}}
    names = ["one", "two", "three"]
    config = task(
        plan=plan,
        fleet={"devices": names},
        model={"pretrained": True},
        train={"epochs": 1, "lr": 1e-3},
    )
    devices = [
        SimDevice(n, runs=PLAIN if n == "two" else (*PLAIN, BACKWARD)) for n in names
    ]
    outcome = train(config, tmp_path / "run", devices)
    found = [stage.mode for stage in plan_of(outcome).stages]
    assert found == ["vjp", "identity", "vjp"]


@pytest.mark.parametrize(
    ("name", "cuts", "branches", "streams", "convolutional"),
    [
        ("stream", ("s0", "s2"), [False, True, False], [False, True, False], [False] * 3),
        ("deep", ("t1", "t3"), [False] * 3, [False] * 3, [False] * 3),
    ],
)
def test_the_compiler_knows_what_a_stage_is_like(
    name, cuts, branches, streams, convolutional
):
    places = [finder(name).named(cut) for cut in cuts]
    trainable = frozenset(program(name).weights)
    found = list(natures(program(name), places, trainable))
    assert [nature.branches for nature in found] == branches
    assert [nature.streams for nature in found] == streams
    assert [nature.convolutional for nature in found] == convolutional
    assert sum(nature.trains for nature in found) == sum(
        weight.size for weight in program(name).weights.values()
    )


def test_a_net_that_convolves_is_known_as_such():
    cut = finder("mobile").valid()[0]
    first, _ = natures(program("mobile"), [cut], frozenset(program("mobile").weights))
    assert first.convolutional
