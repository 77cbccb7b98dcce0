"""Options of the loss on their way from the run file to the device."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from small_task import blobs, two_layers

from coordinator.data import label_spec
from coordinator.job import Job, prepare
from coordinator.run_folder import resolved_toml
from edgetrain.bundle import Bundle
from edgetrain.config import RunConfig, load
from edgetrain.errors import ConfigError, DataError
from edgetrain.losses import LossOptions
from edgetrain.manifest import Mode, view
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.stage import Stage
from edgetrain.tensors import TensorSpec

BATCH = 12
IGNORED = -7
SGD = OptimizerSpec("sgd", LRSpec(1.0))
RUN = """
[model]
path = "m.onnx"
loss_options = {{ {} }}

[data]
train = "train.npz"

[train]
batch_size = 12
"""
OPTIONS = f"ignore_index = {IGNORED}, class_weights = [1.0, 0.5, 3.0]"


@pytest.fixture
def folder(tmp_path):
    """Of 24 samples the first 9 are ignored, so that no two microbatches weigh the same."""
    onnx.save(two_layers(), tmp_path / "m.onnx")
    arrays = blobs(24)
    arrays["labels"][:9] = IGNORED
    np.savez(tmp_path / "train.npz", **arrays)
    return tmp_path


def config(folder, options: str, **train: int) -> RunConfig:
    (folder / "run.toml").write_text(RUN.format(options))
    return load(
        folder / "run.toml", [f"train.{key}={value}" for key, value in train.items()]
    )


def stepped(job: Job) -> Stage:
    """The whole model on one device, after one step on the first samples."""
    microbatches = job.config.train.microbatches
    (bundle,) = job.compile((), (Mode.VJP,))
    again = Bundle.decode(bundle.encode())
    stage = Stage(again, OnnxRuntimeEngine(), SGD, microbatches=microbatches, seed=0)
    data = job.data.train
    for m, rows in enumerate(np.split(np.arange(BATCH), microbatches)):
        taken = data.take(rows)
        stage.forward(Tick(0, m), taken.inputs)
        stage.backward(Tick(0, m), {"labels": taken.labels})
    stage.update(0)
    return stage


def weights(stage: Stage) -> dict[str, np.ndarray]:
    buffer = stage.parameters.weights
    return {spec.name: view(buffer, spec) for spec in stage.manifest.weights}


@pytest.mark.parametrize("microbatches", [2, 4, 12])
def test_it_does_not_matter_how_a_batch_is_cut(folder, microbatches):
    whole = weights(stepped(prepare(config(folder, OPTIONS, microbatches=1))))
    parts = weights(stepped(prepare(config(folder, OPTIONS, microbatches=microbatches))))
    start = prepare(config(folder, OPTIONS)).program.weights
    for name, value in whole.items():
        assert not np.array_equal(value, start[name])
        np.testing.assert_allclose(parts[name], value, rtol=1e-5, atol=1e-6)


def test_the_loss_is_divided_by_the_mean_weight_of_the_training_labels(folder):
    job = prepare(config(folder, OPTIONS))
    (bundle,) = job.compile((), (Mode.VJP,))
    labels = np.load(folder / "train.npz")["labels"]
    factors = np.where(labels == IGNORED, 0, np.take([1.0, 0.5, 3.0], labels.clip(0)))
    found = bundle.manifest.loss_options.mean_weight
    assert found == pytest.approx(factors.mean())
    given = prepare(config(folder, f"{OPTIONS}, mean_weight = 0.25"))
    (bundle,) = given.compile((), (Mode.VJP,))
    assert bundle.manifest.loss_options.mean_weight == 0.25


def test_a_device_counts_hits_where_labels_count(folder):
    stage = stepped(prepare(config(folder, OPTIONS, microbatches=1)))
    data = np.load(folder / "train.npz")
    result = stage.evaluate_loss({"x": data["x"][:BATCH]}, data["labels"][:BATCH])
    assert not result.losses[:9].any()
    assert not result.hits[:9].any()
    assert result.losses[9:].all()


def test_soft_labels_train_and_have_no_hits(folder):
    arrays = blobs(24)
    arrays["labels"] = np.eye(3, dtype=np.float32)[arrays["labels"]]
    np.savez(folder / "train.npz", **arrays)
    stage = stepped(prepare(config(folder, "soft_labels = true", microbatches=1)))
    result = stage.evaluate_loss({"x": arrays["x"][:BATCH]}, arrays["labels"][:BATCH])
    assert result.hits is None
    assert np.isfinite(result.losses).all()


def test_a_label_that_is_neither_class_nor_ignored_is_refused(folder):
    with pytest.raises(DataError, match=r"is -7.*0 to 2, and -8 to ignore one"):
        prepare(config(folder, "ignore_index = -8"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("delta = 2", "takes no option 'delta'"),
        ("smoothing = 0.1", "unknown key 'smoothing'"),
        ("label_smoothing = 2.0", "label_smoothing"),
        ("soft_labels = true, ignore_index = 0", "no index to ignore"),
    ],
)
def test_a_run_file_with_bad_options_is_refused(folder, options, words):
    with pytest.raises(ConfigError, match=words):
        config(folder, options)


def test_the_classes_are_counted_on_their_axis(folder):
    image = TensorSpec("y", "float32", (1, 5, 8, 8))
    labels = TensorSpec("labels", "int64", (1, 8, 8))
    spec = label_spec(config(folder, "class_axis = 1").model, labels, image)
    assert (spec.low, spec.high, spec.ignored) == (0, 4, None)


def test_options_survive_the_resolved_run_file(folder):
    given = config(folder, f"{OPTIONS}, label_smoothing = 0.1")
    (folder / "again.toml").write_text(resolved_toml(given))
    again = load(folder / "again.toml").model.loss_options
    assert again == given.model.loss_options != LossOptions()
