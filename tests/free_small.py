"""Networks so small that an estimator can be averaged over many draws in a second.

Nothing in them is as it was initialized: biases, normalization and its statistics are
random, so that no term of a gradient is zero by chance. Samples and labels are noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from free_data import Samples
from free_nets import Encoder, MobileNet, cnn, mlp
from free_tasks import Task, adam

CLASSES, COUNT, NOISE = 4, 16, 0.3


def _task(
    model: onnx.ModelProto, shape: tuple[int, ...], cuts: Mapping[str, tuple[str, ...]]
) -> Task:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((COUNT, *shape)).astype(np.float32)
    samples = Samples(x, rng.integers(0, CLASSES, COUNT))
    return Task(model, samples, samples, cuts, adam(4, COUNT))


def small_mlp() -> Task:
    """Four layers; `middle`: 1 | 2, 3 | 4."""
    model = mlp((6, 8, 8, 8, CLASSES), noise=NOISE)
    return _task(model, (6,), {"middle": ("relu1", "relu3"), "last": ("relu3",)})


def small_cnn() -> Task:
    """Three convolutions and a dense layer; `middle`: 1 | 2, 3 | head."""
    model = cnn((2, 6, 6), (3, 4, 4), CLASSES, noise=NOISE)
    return _task(model, (2, 6, 6), {"middle": ("relu1", "flat"), "last": ("flat",)})


def small_mobilenet() -> Task:
    """In two dimensions, three blocks, the second halving; `middle`: 1 | 2, 3 | head."""
    net = MobileNet((2, 8, 8), (3, 3, 4, 4), mix=8, classes=CLASSES)
    cuts = {"middle": ("block1", "block3"), "first": ("block2",)}
    return _task(net.model(noise=NOISE), (2, 8, 8), cuts)


def small_mobilenet_1d() -> Task:
    """The same in one dimension."""
    net = MobileNet((2, 16), (3, 3, 4, 4), mix=8, classes=CLASSES)
    cuts = {"middle": ("block1", "block3"), "first": ("block2",)}
    return _task(net.model(noise=NOISE), (2, 16), cuts)


def small_encoder() -> Task:
    """Three blocks on five tokens; `middle`: the embedding and 1 | 2 | 3 and the head."""
    net = Encoder(tokens=5, features=3, width=8, heads=2, blocks=3, classes=CLASSES)
    cuts = {"middle": ("block1", "block2"), "first": ("block1",), "first_two": ("block2",)}
    return _task(net.model(noise=NOISE), (5, 3), cuts)


SMALL: Mapping[str, Callable[[], Task]] = {
    "small_mlp": small_mlp,
    "small_cnn": small_cnn,
    "small_mobilenet": small_mobilenet,
    "small_mobilenet_1d": small_mobilenet_1d,
    "small_encoder": small_encoder,
}
