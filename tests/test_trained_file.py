"""What a run leaves behind: the user's own file with new weights, and how it got there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from small_models import build, normal
from training import IN_ORDER, NAMES, metrics, same_weights, train

from coordinator.session import Outcome
from edgetrain import config as run_file
from edgetrain.compiler.export import differences
from edgetrain.config import DataConfig, FleetConfig, ModelConfig, PlanConfig, RunConfig
from edgetrain.plan import Plan
from edgetrain.train_config import TrainConfig

CLASSES = 4
STEPS = 12
EVAL_EVERY = 5
EVAL_SAMPLES = 37  # not a multiple of the microbatch


def model_with_initializers() -> onnx.ModelProto:
    """A CNN with BatchNormalization, as an older exporter would write it."""
    node = helper.make_node
    model = build(
        [
            node("Conv", ["x", "conv.w", "conv.b"], ["c"], "conv", pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n"], "bn"),
            node("Relu", ["n"], ["r"], "relu"),
            node("Flatten", ["r"], ["f"], "flatten"),
            node("Gemm", ["f", "dense.w", "dense.b"], ["y"], "dense"),
        ],
        [("x", ["N", 2, 4, 4])],
        ["y"],
        {
            "conv.w": 0.3 * normal(6, 2, 3, 3),
            "conv.b": np.zeros(6, np.float32),
            "scale": np.ones(6, np.float32),
            "shift": np.zeros(6, np.float32),
            "mean": np.zeros(6, np.float32),
            "var": np.ones(6, np.float32),
            "dense.w": 0.1 * normal(96, CLASSES, seed=1),
            "dense.b": np.zeros(CLASSES, np.float32),
        },
        opset=14,
    )
    model.producer_name, model.doc_string = "somebody", "keep me"
    model.metadata_props.add(key="labels", value="a,b,c,d")
    return model


def model_with_constants() -> onnx.ModelProto:
    """The same, its weights in Constant nodes as Paddle's exporter writes them."""
    model = model_with_initializers()
    constants = [
        helper.make_node("Constant", [], [tensor.name], value=tensor)
        for tensor in model.graph.initializer
    ]
    nodes = list(model.graph.node)
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend([*constants, *nodes])
    return model


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "initializers": model_with_initializers,
    "constants": model_with_constants,
}


def samples(count: int, seed: int) -> dict[str, np.ndarray]:
    """Four patterns under twice as much noise."""
    labels = np.random.default_rng(seed).integers(0, CLASSES, count)
    x = normal(CLASSES, 2, 4, 4, seed=99)[labels] + 2 * normal(count, 2, 4, 4, seed=seed)
    return {"x": x, "labels": labels}


def config(folder: Path, model: onnx.ModelProto) -> RunConfig:
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "train.npz", **samples(96, seed=1))
    np.savez(folder / "eval.npz", **samples(EVAL_SAMPLES, seed=2))
    return RunConfig(
        ModelConfig(folder / "model.onnx"),
        DataConfig(folder / "train.npz", folder / "eval.npz"),
        TrainConfig(
            steps=STEPS, batch_size=16, microbatches=2, lr=0.03, eval_every=EVAL_EVERY
        ),
        PlanConfig(cuts=("c", "r"), pin=IN_ORDER),
        FleetConfig(devices=NAMES),
    )


@pytest.fixture(scope="module", params=MODELS)
def finished(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[onnx.ModelProto, Outcome]:
    """A model as it was, and a run that trained it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = MODELS[request.param]()
    return model, train(config(folder, model), folder / "run")


def test_only_weights_differ(finished: tuple[onnx.ModelProto, Outcome]) -> None:
    model, outcome = finished
    trained = onnx.load(outcome.model)
    assert differences(model, trained) == []
    before, after = values(model), values(trained)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert not np.array_equal(value, after[name]), f"{name} was not trained"


def values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Tensors in initializers and Constant nodes."""
    tensors = {t.name: t for t in model.graph.initializer}
    tensors |= {
        node.output[0]: node.attribute[0].t
        for node in model.graph.node
        if node.op_type == "Constant"
    }
    return {name: numpy_helper.to_array(tensor) for name, tensor in tensors.items()}


def test_plain_onnxruntime_gets_the_evaluated_score(
    finished: tuple[onnx.ModelProto, Outcome],
) -> None:
    _, outcome = finished
    session = onnxruntime.InferenceSession(
        outcome.model, providers=["CPUExecutionProvider"]
    )
    held_out = samples(EVAL_SAMPLES, seed=2)
    (logits,) = session.run(None, {"x": held_out["x"]})
    labels = held_out["labels"]
    logits = logits.astype(np.float64)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]
    assert outcome.score is not None
    assert outcome.score.samples == EVAL_SAMPLES
    assert outcome.score.accuracy == np.mean(logits.argmax(axis=1) == labels)
    assert outcome.score.loss == pytest.approx(losses.mean(), rel=1e-6)
    assert 1.5 / CLASSES < outcome.score.accuracy < 1, "the score should be a telling one"


def test_the_run_folder_is_complete(finished: tuple[onnx.ModelProto, Outcome]) -> None:
    _, outcome = finished
    folder = outcome.folder
    files = {path.name for path in folder.iterdir()}
    wanted = {"run.toml", "plan.json", "metrics.jsonl", "trained.onnx", "report.html"}
    assert wanted <= files
    assert not [name for name in files if name.endswith(".partial")]
    plan = Plan.decode((folder / "plan.json").read_bytes())
    assert [stage.device for stage in plan.stages] == list(NAMES)
    assert [stage.cut for stage in plan.stages] == [("c",), ("r",), ()]
    html = (folder / "report.html").read_text()
    assert all(name in html for name in NAMES)


def test_metrics_have_a_line_a_step_and_evaluation(
    finished: tuple[onnx.ModelProto, Outcome],
) -> None:
    _, outcome = finished
    lines = metrics(outcome.folder)
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    assert len(steps) + len(evaluations) == len(lines)
    for line in steps:
        assert {"step", "epoch", "loss", "seconds", "bytes_sent"} <= line.keys()
    for line in evaluations:
        assert {"step", "epoch", "seconds", "eval_loss", "eval_accuracy"} <= line.keys()
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["epoch"] for line in steps] == [step // 6 for step in range(STEPS)]
    assert [line["step"] for line in evaluations] == [5, 10, 12]
    assert outcome.score is not None
    last = evaluations[-1]
    assert (last["eval_loss"], last["eval_accuracy"]) == outcome.score[:2]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)


def test_the_written_run_file_repeats_the_run(
    finished: tuple[onnx.ModelProto, Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, outcome = finished
    monkeypatch.chdir(tmp_path)  # it must not depend on where the first run was started
    again = train(run_file.load(outcome.folder / "run.toml"), tmp_path / "again")
    assert same_weights(outcome.folder, again.folder)
    assert again.score == outcome.score


def test_another_seed_gives_another_run(
    finished: tuple[onnx.ModelProto, Outcome], tmp_path: Path
) -> None:
    """What the comparison of repeated runs would not notice, were it blind."""
    _, outcome = finished
    other = run_file.load(outcome.folder / "run.toml", ["train.seed=1"])
    assert not same_weights(outcome.folder, train(other, tmp_path / "other").folder)
