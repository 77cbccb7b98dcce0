"""Loss and accuracy of a file as it is, against numpy."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from small_models import build, normal
from small_task import CLASSES, blobs, two_layers

from coordinator.evaluate_command import BATCH, evaluate, show
from coordinator.score import Score
from edgetrain.config import ModelConfig
from edgetrain.errors import DataError, GraphError

SAMPLES = BATCH + 7  # a batch that is full, and one that is not
DATA = blobs(SAMPLES)


@pytest.fixture
def saved(tmp_path: Path):
    """Saves a model and samples; gives what `evaluate` takes."""

    def save(
        model: onnx.ModelProto, loss: str = "softmax_cross_entropy", **arrays: np.ndarray
    ) -> tuple[ModelConfig, Path]:
        onnx.save(model, tmp_path / "m.onnx")
        np.savez(tmp_path / "data.npz", **{**DATA, **arrays})
        return ModelConfig(path=tmp_path / "m.onnx", loss=loss), tmp_path / "data.npz"

    return save


def scores(x: np.ndarray) -> np.ndarray:
    """What `two_layers` computes, in float64."""
    held = {t.name: onnx.numpy_helper.to_array(t) for t in two_layers().graph.initializer}
    w = {name: value.astype(np.float64) for name, value in held.items()}
    return np.maximum(x @ w["w1"] + w["b1"], 0) @ w["w2"] + w["b2"]


def cross_entropy(z: np.ndarray, labels: np.ndarray) -> float:
    log_sum = np.log(np.exp(z).sum(axis=1))
    return float((log_sum - z[np.arange(len(z)), labels]).mean())


def with_softmax(kind: str) -> onnx.ModelProto:
    """`two_layers` as its file ends in a Softmax, or hides all in a function."""
    model = two_layers()
    graph = model.graph
    graph.node[-1].output[0] = "logits"
    graph.node.append(helper.make_node("Softmax", ["logits"], ["y"], "softmax", axis=-1))
    if kind == "softmax":
        return model
    inputs = ["x", *(tensor.name for tensor in graph.initializer)]
    opset = helper.make_opsetid("", 20)
    body = helper.make_function("own", "Net", inputs, ["y"], list(graph.node), [opset])
    del graph.node[:]
    graph.node.append(helper.make_node("Net", inputs, ["y"], "net", domain="own"))
    graph.output[0].type.CopyFrom(
        helper.make_tensor_type_proto(TensorProto.FLOAT, ["N", CLASSES])
    )
    model.functions.append(body)
    model.opset_import.append(helper.make_opsetid("own", 1))
    return model


def fixed_batch(rows: int) -> onnx.ModelProto:
    model = two_layers()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = rows
    return model


@pytest.mark.parametrize(
    "model",
    [
        two_layers(),
        with_softmax("softmax"),
        with_softmax("function"),
        fixed_batch(1),
        fixed_batch(5),
    ],
    ids=["logits", "softmax", "function", "batch 1", "batch 5"],
)
def test_cross_entropy_and_accuracy(saved, model):
    score = evaluate(*saved(model))
    z = scores(DATA["x"])
    assert score.loss == pytest.approx(cross_entropy(z, DATA["labels"]), rel=1e-5)
    assert score.accuracy == pytest.approx((z.argmax(axis=1) == DATA["labels"]).mean())
    assert score.samples == SAMPLES


def test_a_model_in_half_precision(saved):
    model = two_layers()
    for tensor in model.graph.initializer:
        value = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.elem_type = TensorProto.FLOAT16
    score = evaluate(*saved(model))
    loss = cross_entropy(scores(DATA["x"]), DATA["labels"])
    assert score.loss == pytest.approx(loss, rel=1e-2)


def test_squared_error_has_no_accuracy(saved):
    labels = normal(SAMPLES, CLASSES, seed=5)
    score = evaluate(*saved(two_layers(), "mse", labels=labels))
    expected = ((scores(DATA["x"]) - labels) ** 2).mean()
    assert score == Score(pytest.approx(expected, rel=1e-5), None, SAMPLES)


def test_the_output_that_is_named_counts(saved):
    model = two_layers()
    shape = ["N", 16]
    model.graph.output.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, shape))
    config, data = saved(model)
    with pytest.raises(GraphError, match="several outputs"):
        evaluate(config, data)
    named = ModelConfig(path=config.path, output="y")
    loss = cross_entropy(scores(DATA["x"]), DATA["labels"])
    assert evaluate(named, data).loss == pytest.approx(loss, rel=1e-5)


def test_labels_that_do_not_fit_are_refused(saved):
    with pytest.raises(DataError, match="the label of sample 0 is 9"):
        evaluate(*saved(two_layers(), labels=np.full(SAMPLES, 9)))


def test_a_loss_that_is_not_finite_is_null_in_json(capsys):
    show(Score(float("nan"), None, 3), as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"loss": None, "accuracy": None, "samples": 3}


def test_words_for_people(capsys):
    show(Score(0.5, 0.75, 4), as_json=False)
    show(Score(0.5, None, 4), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "loss 0.5000, accuracy 0.7500 on 4 samples",
        "loss 0.5000 on 4 samples",
    ]


def test_a_scalar_output_has_no_classes(saved):
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], "only")]
    model = build(nodes, [("x", ["N", 4])], ["y"], {"w": normal(4, 1)})
    with pytest.raises(GraphError, match="two classes or more"):
        evaluate(*saved(model))
