"""Models that run at their own batch size only: it becomes the microbatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from small_models import build, normal
from small_task import CLASSES, blobs, hard_coded, two_layers

from coordinator.cli import main
from coordinator.evaluate_command import evaluate
from coordinator.inspect_command import inspect
from coordinator.job import prepare
from coordinator.run_folder import REPORT_FILE
from edgetrain.compiler.grad import grad
from edgetrain.compiler.normalise import normalise
from edgetrain.config import ModelConfig, RunConfig, load, parse
from edgetrain.errors import ConfigError, GraphError
from edgetrain.plan import Plan
from edgetrain.sim.fleet import SimDevice
from edgetrain.train_config import TrainConfig

EVAL_SAMPLES = 10  # no multiple of 4


def with_statistics(rows: int) -> onnx.ModelProto:
    """`hard_coded` with a BatchNormalization behind it."""
    model = hard_coded(rows)
    model.graph.node[-1].output[0] = "z"
    names = ["scale", "bias", "mean", "var"]
    model.graph.node.append(
        helper.make_node("BatchNormalization", ["z", *names], ["y"], "norm")
    )
    for name in names:
        value = np.full(CLASSES, name in {"scale", "var"}, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


def beside_open(rows: int) -> onnx.ModelProto:
    """x [N, 4] and side [rows, 3] -> the rows of x @ w + side less their greatest."""
    node = helper.make_node
    return build(
        [
            node("MatMul", ["x", "w"], ["h"]),
            node("Add", ["h", "side"], ["a"]),
            node("ReduceMax", ["a", "axes"], ["m"], keepdims=1),
            node("Sub", ["a", "m"], ["y"]),
        ],
        [("x", ["N", 4]), ("side", [rows, CLASSES])],
        ["y"],
        {"w": normal(4, CLASSES), "axes": np.asarray([0])},
    )


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """A run file's table, of nine steps of Adam, without its model."""
    np.savez(tmp_path / "train.npz", **blobs(96))
    np.savez(tmp_path / "eval.npz", **blobs(EVAL_SAMPLES, seed=1))
    return {
        "model": {"path": "m.onnx"},
        "data": {"train": "train.npz", "eval": "eval.npz"},
        "train": {"epochs": 3, "batch_size": 32, "optimizer": "adam", "lr": 0.03},
    }


def config(folder: Path, table: dict[str, Any], **train: Any) -> RunConfig:
    table = {**table, "train": {**table["train"], **train}}
    return parse(table, folder=folder)


def trained(path: Path, rows: int) -> dict[str, np.ndarray]:
    return dict(normalise(onnx.load(path), batch=rows).weights)


@pytest.mark.parametrize("rows", [1, 4])
def test_it_trains_as_the_same_model_with_an_open_batch(
    edgetrain_fleet, table, tmp_path, rows
):
    fleet = edgetrain_fleet([SimDevice("a"), SimDevice("b")])
    onnx.save(two_layers(), tmp_path / "m.onnx")
    expected = fleet.train(table)
    onnx.save(hard_coded(rows), tmp_path / "m.onnx")
    outcome = fleet.train(table)

    before = trained(tmp_path / "m.onnx", rows)
    after, wanted = trained(outcome.model, rows), trained(expected.model, 1)
    assert outcome.steps == expected.steps == 9
    assert after.keys() == wanted.keys()
    for name, value in after.items():
        assert np.abs(value - before[name]).max() > 1e-2
        np.testing.assert_allclose(value, wanted[name], rtol=1e-6, atol=1e-6)
    assert outcome.score.samples == EVAL_SAMPLES
    assert outcome.score.loss == pytest.approx(expected.score.loss, abs=1e-6)
    assert outcome.score.accuracy == expected.score.accuracy


def test_the_user_is_told_in_one_line(edgetrain_fleet, table, tmp_path):
    onnx.save(hard_coded(4), tmp_path / "m.onnx")
    outcome = edgetrain_fleet([SimDevice("a")]).train(table)
    (remark,) = outcome.remarks
    assert "\n" not in remark
    for words in (
        "fixes its batch size at 4",
        "batch of 32",
        "microbatches of 4, 8 a step",
    ):
        assert words in remark
    plan = Plan.decode((outcome.folder / "plan.json").read_bytes())
    assert (plan.microbatches, plan.microbatch, plan.remarks) == (8, 4, (remark,))
    assert "fixes its batch size at 4" in (outcome.folder / REPORT_FILE).read_text()
    again = load(outcome.folder / "run.toml")
    assert again.train.microbatches == 8
    assert prepare(again).program.remarks == ()


def test_what_batch_normalisation_sees_is_said_where_it_matters(table, tmp_path):
    onnx.save(with_statistics(4), tmp_path / "m.onnx")
    (remark,) = prepare(config(tmp_path, table)).program.remarks
    assert "BatchNormalization" in remark
    assert "4 samples" in remark
    frozen = prepare(config(tmp_path, table, batchnorm="frozen")).program.remarks
    assert not any("samples at a time" in remark for remark in frozen)
    assert any("had never seen data" in remark for remark in frozen)


def test_a_batch_that_is_no_multiple_is_refused(table, tmp_path):
    onnx.save(hard_coded(4), tmp_path / "m.onnx")
    with pytest.raises(ConfigError) as caught:
        prepare(config(tmp_path, table, batch_size=18))
    text = str(caught.value)
    assert "\n" not in text
    for words in ("batch_size = 18", "multiple of 4", "set it to 16 or 20", "dynamic"):
        assert words in text
    with pytest.raises(ConfigError, match="set it to 4,"):
        prepare(config(tmp_path, table, batch_size=3))


def test_microbatches_that_were_asked_for_are_not_replaced(table, tmp_path):
    onnx.save(hard_coded(4), tmp_path / "m.onnx")
    with pytest.raises(GraphError, match=r"'x' takes 4.*leave \[train\] microbatches out"):
        prepare(config(tmp_path, table, microbatches=2))
    assert prepare(config(tmp_path, table, microbatches=8)).program.remarks == ()


def test_another_input_may_be_the_one_that_fixes_it():
    program = normalise(beside_open(4), batch=8, own_batch=True)
    assert [spec.shape for spec in program.inputs] == [(4, 4), (4, CLASSES)]
    with pytest.raises(GraphError, match=r"'side' takes 4.*Take 4 samples at a time"):
        normalise(beside_open(4), batch=8)


def test_a_batch_that_can_be_changed_is_changed(table, tmp_path):
    model = two_layers()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, tmp_path / "m.onnx")
    job = prepare(config(tmp_path, table))
    assert job.program.batch == 8
    assert job.program.remarks == ()


@pytest.mark.parametrize(
    ("batch_size", "count"), [(32, 4), (6, 2), (7, 1), (4, 4), (2, 2), (1, 1)]
)
def test_a_batch_is_cut_into_four_unless_told(batch_size, count):
    assert TrainConfig(batch_size=batch_size).microbatch_count == count
    assert TrainConfig(batch_size=batch_size, microbatches=1).microbatch_count == 1


@pytest.mark.parametrize("rows", [1, 4])
def test_evaluating_goes_through_the_samples_in_the_models_own_batch(tmp_path, rows):
    np.savez(tmp_path / "eval.npz", **blobs(EVAL_SAMPLES, seed=1))
    scores = []
    for model in (hard_coded(rows), two_layers()):
        onnx.save(model, tmp_path / "m.onnx")
        scores.append(evaluate(ModelConfig(tmp_path / "m.onnx"), tmp_path / "eval.npz"))
    own, wanted = scores
    assert own.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert (own.accuracy, own.samples) == (wanted.accuracy, EVAL_SAMPLES)


def test_inspecting_shows_the_models_own_batch(tmp_path):
    onnx.save(hard_coded(4), tmp_path / "m.onnx")
    onnx.save(two_layers(), tmp_path / "open.onnx")
    facts = inspect(tmp_path / "m.onnx", 1, None)
    wanted = inspect(tmp_path / "open.onnx", 4, None)
    assert facts.inputs == wanted.inputs
    assert facts.obstacle == ""
    assert facts.cuts[0].bytes_a_sample == wanted.cuts[0].bytes_a_sample
    assert facts.flop_a_sample == pytest.approx(wanted.flop_a_sample, rel=0.2)
    assert any("fixes its batch size at 4" in remark for remark in facts.remarks)
    assert inspect(tmp_path / "m.onnx", 4, None).remarks == ()


def test_differentiating_says_which_batch_to_ask_for(tmp_path, capsys):
    onnx.save(hard_coded(4), tmp_path / "m.onnx")
    with pytest.raises(GraphError, match=r"'x' takes 4.*--batch 4"):
        grad(tmp_path / "m.onnx")
    command = ["grad", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "g.onnx")]
    assert main([*command, "--batch", "8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--batch 4" in line
    assert main([*command, "--batch", "4"]) == 0
