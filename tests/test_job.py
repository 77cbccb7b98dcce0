"""What a run checks before it asks any device for anything."""

from __future__ import annotations

import msgspec
import numpy as np
import onnx
import pytest
from small_models import build, normal

from coordinator.job import prepare
from edgetrain.config import DataConfig, ModelConfig, RunConfig
from edgetrain.errors import ConfigError, DataError, UnsupportedOpError
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.train_config import TrainConfig

TRAIN = TrainConfig(batch_size=4, microbatches=2, steps=1)


def open_image(extra=()):
    """A classifier of [N, 1, height, width] images of any size."""
    node = onnx.helper.make_node
    nodes = [
        node("Conv", ["x", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
        *extra,
        node("GlobalAveragePool", ["c" if not extra else "d"], ["p"], "pool"),
        node("Flatten", ["p"], ["y"], "flat"),
    ]
    tensors = {"w": normal(3, 1, 3, 3)}
    return build(nodes, [("x", ["N", 1, "height", "width"])], ["y"], tensors)


def config(folder, model, shape=(8, 1, 6, 5), **settings):
    onnx.save(model, folder / "m.onnx")
    np.savez(folder / "d.npz", x=normal(*shape), labels=np.arange(8) % 3)
    return RunConfig(
        ModelConfig(folder / "m.onnx", **settings), DataConfig(folder / "d.npz"), TRAIN
    )


def test_extents_the_file_leaves_open_come_from_the_data(tmp_path):
    job = prepare(config(tmp_path, open_image()))
    assert job.program.inputs[0].shape == (2, 1, 6, 5)


def test_extents_that_are_said_must_fit_the_data(tmp_path):
    shapes = {"x": (1, 7, 7)}
    with pytest.raises(DataError, match=r"'x'"):
        prepare(config(tmp_path, open_image(), shapes=shapes))
    with pytest.raises(ConfigError, match=r"shapes\.x"):
        ModelConfig(tmp_path / "m.onnx", shapes={"x": (1, 0)})


def test_an_op_without_a_rule_is_known_before_any_device_is_asked(tmp_path):
    det = onnx.helper.make_node("Det", ["c"], ["e"], "the_det")
    back = onnx.helper.make_node("Reshape", ["e", "shape"], ["d"], "back")
    model = open_image((det, back))
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.array([-1, 3, 1, 1]), "shape")
    )
    with pytest.raises(UnsupportedOpError, match=r"Det.*the_det"):
        prepare(config(tmp_path, model, shape=(8, 1, 6, 6)))


def test_integers_need_samples_to_settle_their_scales(tmp_path):
    estimator = EstimatorSpec(noise="weights", quantised=True)
    start = msgspec.structs.replace(config(tmp_path, open_image()), estimator=estimator)
    low, high = prepare(start).ranges["x"]
    seen = np.load(tmp_path / "d.npz")["x"]
    assert low <= seen.min() < 0 < seen.max() <= high
    there = DataConfig(device="pi", dataset="images")
    shapes = ModelConfig(tmp_path / "m.onnx", shapes={"x": (1, 6, 5)})
    away = msgspec.structs.replace(start, data=there, model=shapes)
    with pytest.raises(ConfigError, match=r"quantised.*stay on 'pi'.*\[data\] train"):
        prepare(away)


def test_weights_in_data_files_are_written_to_copies_of_them(tmp_path):
    start = config(tmp_path, open_image())
    path = tmp_path / "m.onnx"
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    before = (tmp_path / "w.bin").read_bytes()
    job = prepare(start)
    assert job.data_files
    (tmp_path / "out").mkdir()
    trained = {"w": normal(3, 1, 3, 3, seed=7)}
    job.export(tmp_path / "out" / "m.onnx", trained)
    assert (tmp_path / "w.bin").read_bytes() == before
    (weight,) = onnx.load(tmp_path / "out" / "m.onnx").graph.initializer
    assert np.array_equal(onnx.numpy_helper.to_array(weight), trained["w"])
