"""A stage without backprop that does worse than it did when deployed goes back."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from small_task import blobs, run_table, write_small_task
from training import Wire, metrics, same_weights, train, weights_of

from coordinator.gate import is_worse
from coordinator.metrics import METRICS_FILE, GateMetrics, read_lines, read_metrics
from edgetrain.config import RunConfig, parse
from edgetrain.errors import RunError
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.manifest import Mode
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.fallback import KEEP, TRY, UNDO
from edgetrain.runtime.memory_forecast import required_bytes
from edgetrain.runtime.stage import Stage
from edgetrain.sim.fleet import SimDevice
from edgetrain.wire.messages import Evaluate, Revert, decode_command
from edgetrain.wire.topics import Channel
from tests.stage_runs import ENGINE, OPTIMIZER, compiled, finder

DEVICES = [SimDevice("one"), SimDevice("two")]


@pytest.fixture
def task(tmp_path):
    """Files of the small task, and how to make a run file of them."""
    write_small_task(tmp_path)

    def config(**sections: object) -> RunConfig:
        table = run_table()
        table["train"]["gradient"] = ["hybrid", "vjp"]
        table["plan"] = {"cuts": ["r"], "pin": {"first": "one", "last": "two"}}
        table["fleet"] = {"devices": ["one", "two"]}
        for name, section in sections.items():
            table[name] = {**table.get(name, {}), **section}
        return parse(table, folder=tmp_path)

    return config


@pytest.fixture
def spoilt(task, tmp_path):
    """The task learnt already, and wrong labels to train on."""
    first = train(task(), tmp_path / "before", DEVICES)
    first.model.replace(tmp_path / "m.onnx")
    data = blobs(192)
    np.savez(tmp_path / "train.npz", x=data["x"], labels=(data["labels"] + 1) % 3)
    return task


def test_a_gate_that_lets_through_changes_no_bit(task, tmp_path):
    wire = Wire()
    found = train(task(), tmp_path / "gated", DEVICES, wire=wire)
    plain = train(task(estimator={"gate": False}), tmp_path / "plain", DEVICES)
    assert same_weights(found.folder, plain.folder)
    assert found.score == plain.score
    gates = read_lines(found.folder / METRICS_FILE, GateMetrics)
    assert [gate.step for gate in gates] == [6, 18, 36]
    assert not any(gate.rolled_back for gate in gates)
    assert gates[-1].gate_trained >= gates[-1].gate_deployed
    assert not read_lines(plain.folder / METRICS_FILE, GateMetrics)
    assert "<td>kept</td>" in (found.folder / "report.html").read_text()
    assert found.remarks == plain.remarks
    commands = [
        decode_command(sent.payload)
        for sent in wire.messages
        if sent.channel is Channel.CONTROL and sent.to == "one"
    ]
    assert sum(isinstance(c, Revert) for c in commands) == 2 * len(gates)
    assert sum(isinstance(c, Evaluate) for c in commands) == 6 + len(gates)


def test_a_stage_that_does_harm_is_rolled_back_and_the_others_go_on(spoilt, tmp_path):
    before = weights_of(tmp_path / "m.onnx")
    config = spoilt(model={"trainable": ["w1", "b1", "b2"]}, train={"lr": 0.1})
    outcome = train(config, tmp_path / "run", DEVICES)
    after = weights_of(outcome.model)
    assert np.array_equal(after["w1"], before["w1"])
    assert np.array_equal(after["b1"], before["b1"])
    assert not np.array_equal(after["b2"], before["b2"])
    first, gate = read_lines(outcome.folder / METRICS_FILE, GateMetrics)
    assert (first.step, first.gate_stage, first.rolled_back) == (6, 0, False)
    assert first.gate_trained < first.gate_deployed
    assert (gate.step, gate.gate_stage, gate.rolled_back) == (18, 0, True)
    (remark,) = outcome.remarks
    assert remark == (
        "stage 0 (hybrid on one) was rolled back at step 18 and trains no more: accuracy"
        f" {gate.gate_trained:.4g} with its training, {gate.gate_deployed:.4g} without"
    )
    assert "rolled back" in (outcome.folder / "report.html").read_text()


def test_the_last_score_is_that_of_the_weights_that_are_kept(spoilt, tmp_path):
    config = spoilt(model={"trainable": ["w1", "b1"]}, train={"epochs": 1, "lr": 0.1})
    outcome = train(config, tmp_path / "run", DEVICES)
    steps, evaluations = read_metrics(outcome.folder / METRICS_FILE)
    (gate,) = read_lines(outcome.folder / METRICS_FILE, GateMetrics)
    assert len(steps) == 6
    assert [e.eval_accuracy for e in evaluations] == [
        gate.gate_trained,
        gate.gate_deployed,
    ]
    assert outcome.score.accuracy == gate.gate_deployed > 0.9
    assert gate.gate_trained < 0.9
    for name, value in weights_of(tmp_path / "m.onnx").items():
        assert np.array_equal(weights_of(outcome.model)[name], value)


def test_without_held_out_samples_there_is_no_gate(task, tmp_path):
    config = task()
    data = msgspec.structs.replace(config.data, eval=None)
    config = msgspec.structs.replace(config, data=data)
    outcome = train(config, tmp_path / "run", DEVICES)
    assert not any("gate_stage" in line for line in metrics(outcome.folder))


def hybrid(*, gate: bool) -> Stage:
    spec = EstimatorSpec(1, gate=gate)
    cuts = [finder("deep").named(name) for name in ("t1", "t3")]
    modes = [Mode.VJP, Mode.HYBRID, Mode.VJP]
    bundle = compiled("deep", cuts, modes=modes, estimator=spec)[1]
    return Stage(bundle, ENGINE, OPTIMIZER, microbatches=1, seed=0)


def step(stage: Stage, number: int) -> None:
    rng = np.random.default_rng(number)
    (received,), (sent,) = stage.manifest.receives, stage.manifest.sends
    values = {received.name: rng.standard_normal(received.shape).astype(np.float32)}
    stage.forward(Tick(number, 0), values)
    stage.backward(Tick(number, 0), {sent.name: np.ones(sent.shape, np.float32)})
    stage.update(number)


def test_trying_leaves_no_trace():
    tried, plain = hybrid(gate=True), hybrid(gate=False)
    deployed = plain.parameters.weights.copy()
    for number in range(4):
        step(tried, number)
        step(plain, number)
        for action in (TRY, TRY):
            tried.revert(action)
            assert np.array_equal(tried.parameters.weights, deployed)
        for action in (UNDO, UNDO):
            tried.revert(action)
            assert np.array_equal(tried.parameters.weights, plain.parameters.weights)


def test_what_was_kept_stays_for_good():
    stage = hybrid(gate=True)
    deployed = stage.parameters.weights.copy()
    step(stage, 0)
    full = stage.memory_bytes
    stage.revert(TRY)
    stage.revert(KEEP)
    assert stage.memory_bytes < full
    for number in (1, 2):
        step(stage, number)
        assert stage.square_sum() == 0
        assert np.array_equal(stage.parameters.weights, deployed)
        assert np.array_equal(stage.parameters.committed(number), deployed)
    stage.revert(UNDO)
    assert np.array_equal(stage.parameters.weights, deployed)


def test_the_copy_is_counted():
    with_copy, without = hybrid(gate=True), hybrid(gate=False)
    more = 4 * with_copy.manifest.trainable_elements
    assert with_copy.memory_bytes - without.memory_bytes == more
    needed = [required_bytes(s.manifest, OPTIMIZER, 1) for s in (with_copy, without)]
    assert needed[0] - needed[1] == more


def test_a_stage_that_kept_nothing_cannot_go_back():
    with pytest.raises(RunError, match="nothing to go back to"):
        hybrid(gate=False).revert(TRY)
    with pytest.raises(RunError, match="'dance'"):
        hybrid(gate=True).revert("dance")


def scored(right: int, of: int = 100) -> np.ndarray:
    return (np.arange(of) < right).astype(np.float32)


@pytest.mark.parametrize(
    ("trained", "deployed", "worse"),
    [
        (scored(80), scored(80), False),
        (scored(80), scored(82), False),  # two samples may be chance
        (scored(80), scored(90), True),
        (scored(90), scored(80), False),
        (scored(80), scored(100)[::-1], True),
        (scored(50), scored(52)[::-1], False),  # each right where the other is wrong
        (scored(1, 1), scored(1, 1), False),
        (np.zeros(0, np.float32), np.zeros(0, np.float32), False),
        (-np.ones(9, np.float32), -np.full(9, 0.5, np.float32), True),
        (np.full(9, np.nan, np.float32), np.zeros(9, np.float32), True),
        (np.zeros(9, np.float32), np.full(9, np.nan, np.float32), False),
        (np.full(9, np.nan, np.float32), np.full(9, -np.inf, np.float32), False),
    ],
)
def test_worse_is_more_than_noise(trained, deployed, worse):
    assert is_worse(trained, deployed) == worse


def test_equal_weights_are_seldom_found_worse():
    """Two sides that differ by chance alone: about one time in forty."""
    rng = np.random.default_rng(0)
    found = [
        is_worse(*(rng.random((2, 200)) < 0.8).astype(np.float32)) for _ in range(2000)
    ]
    assert 0.005 < np.mean(found) < 0.05
