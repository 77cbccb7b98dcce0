"""A downloaded MobileNetV3 with its weights in Constant nodes, on three agents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from inputs import cached
from training import metrics, on_three, train, weights_of

from edgetrain.compiler.export import differences
from edgetrain.config import DataConfig, ModelConfig, RunConfig
from edgetrain.train_config import TrainConfig

HEIGHT, WIDTH = 48, 192
BATCH = 16
STEPS = 5
CUTS = ("elementwise_add_0", "elementwise_add_4")


def lines_of_text(count: int, seed: int) -> dict[str, np.ndarray]:
    """Strokes on a baseline, some reaching above it; half of them upside down.

    Returns:
        `x` float32 [count, 3, 48, 192] in -1 ... 1, and `labels` int64 [count], 1 where
        turned by 180 degrees.
    """
    rng = np.random.default_rng(seed)
    x = np.ones((count, 3, HEIGHT, WIDTH), np.float32)
    labels = np.arange(count) % 2
    for image, label in zip(x, labels, strict=True):
        left = 4
        while left < WIDTH - 16:
            width = int(rng.integers(3, 9))
            top = 6 if rng.random() < 0.4 else 20
            image[:, top:38, left : left + width] = -rng.uniform(0.5, 1)
            left += width + int(rng.integers(3, 7))
        if label:
            image[:] = image[:, ::-1, ::-1].copy()
    return {"x": x, "labels": labels}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The file, its height and width fixed as its users do before they deploy it."""
    proto = onnx.load(cached("text_direction.onnx"))
    for extent, size in zip((2, 3), (HEIGHT, WIDTH), strict=True):
        proto.graph.input[0].type.tensor_type.shape.dim[extent].dim_value = size
    path = tmp_path / "text_direction.onnx"
    onnx.save(proto, path)
    return path


def test_it_trains_and_comes_back_with_new_weights(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "lines.npz", **lines_of_text(BATCH, seed=0))
    settings = {"lr": 0.001, "momentum": 0.0, "shuffle": False}
    config = RunConfig(
        ModelConfig(model),
        DataConfig(tmp_path / "lines.npz"),
        TrainConfig(steps=STEPS, batch_size=BATCH, microbatches=2, **settings),
    )
    before = weights_of(model)
    train(on_three(config, CUTS), tmp_path / "run")
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    print([round(loss, 3) for loss in losses])  # noqa: T201 - shown with pytest -s
    assert losses[-1] < 0.2 * losses[0]
    trained = tmp_path / "run" / "trained.onnx"
    assert differences(onnx.load(model), onnx.load(trained)) == []
    after = weights_of(trained)
    still = [name for name, value in before.items() if np.array_equal(value, after[name])]
    # The next BatchNormalization subtracts what these shifts add: they have no gradient.
    assert all(name.endswith("linear_bn_offset") for name in still), still
    assert len(still) < len(before) / 10
