from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort

from coordinator.demo_model import EVAL_PER_CLASS, digits, digits_model, write_digits
from edgetrain.sample_check import LabelSpec, check
from edgetrain.sample_files import load
from edgetrain.tensors import TensorSpec


def logits(model, image):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"image": image})[0]


def test_the_model_is_valid_onnx_of_any_batch_size():
    model = digits_model()
    onnx.checker.check_model(model, full_check=True)
    image = np.random.default_rng(0).random((5, 1, 8, 8), np.float32)
    whole = logits(model, image)
    assert whole.shape == (5, 10)
    np.testing.assert_allclose(logits(model, image[:1]), whole[:1], atol=1e-5)


def test_seeds_fix_the_weights():
    assert digits_model(3) == digits_model(3)
    assert digits_model(3) != digits_model(4)


def test_he_initialisation_keeps_the_signal_at_its_size():
    train, _ = digits()
    spread = logits(digits_model(), train.inputs["image"]).std()
    assert 0.1 < spread < 3


def test_every_edge_is_a_cut():
    model = digits_model()
    weights = {tensor.name for tensor in model.graph.initializer}
    value = model.graph.input[0].name
    for node in model.graph.node:
        assert [name for name in node.input if name not in weights] == [value]
        (value,) = node.output
    assert value == model.graph.output[0].name


def test_the_digits_are_whole_scaled_and_split_without_overlap():
    train, test = digits()
    assert (np.bincount(test.labels) == EVAL_PER_CLASS).all()
    assert len(train) + len(test) == 1797
    image = np.concatenate([train.inputs["image"], test.inputs["image"]])
    assert image.dtype == np.float32
    assert (image.min(), image.max()) == (0, 1)
    rows = {sample.tobytes() for sample in train.inputs["image"]}
    assert not rows & {sample.tobytes() for sample in test.inputs["image"]}
    assert np.bincount(train.labels).min() > 100


def test_the_written_files_are_what_a_user_would_bring(tmp_path):
    inputs = [TensorSpec("image", "float32", (1, 1, 8, 8))]
    labels = LabelSpec(TensorSpec("labels", "int64", (1,)), low=0, high=9)
    for path, part in zip(write_digits(tmp_path), digits(), strict=True):
        read = check(load(path), inputs, labels)
        np.testing.assert_array_equal(read.inputs["image"], part.inputs["image"])
        np.testing.assert_array_equal(read.labels, part.labels)
        assert read.remarks == ()
