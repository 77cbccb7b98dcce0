"""What backprop-free training is tested on: a model, its data, its cuts and its recipe.

Figures are accuracies on `eval` in percent, before -> after training with exact gradients
in one run; `free_runs.py` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import free_data
import msgspec
import onnx
from free_data import Samples
from free_nets import MobileNet, mlp

from edgetrain.train_config import TrainConfig

DATA = Path(__file__).resolve().parent / "data"


@dataclass(frozen=True)
class Task:
    """One of the tasks.

    Attributes:
        model: from ``x`` to ``logits``.
        train, eval: its samples.
        cuts: by a word, the tensors that part the stages.
        recipe: how it is trained.
    """

    model: onnx.ModelProto
    train: Samples
    eval: Samples
    cuts: Mapping[str, tuple[str, ...]]
    recipe: TrainConfig


def adam(steps: int, batch_size: int, lr: float = 3e-3) -> TrainConfig:
    """Adam with a rate that falls to 0 as a cosine, evaluated once, at the end."""
    return TrainConfig(
        steps=steps,
        batch_size=batch_size,
        microbatches=2,
        optimizer="adam",
        lr=lr,
        lr_schedule="cosine",
        eval_every=steps,
    )


def shipped(name: str) -> onnx.ModelProto:
    """A pretrained model; `scripts/pretrain_models.py` made it."""
    return onnx.load(DATA / f"{name}.onnx")


def digits_mlp(steps: int = 300) -> Task:
    """64-128-64-10 from scratch; `last`: the last layer apart from the other two.

    10 -> 98.5; after 1,500 steps 99.0.
    """
    cuts = {"last": ("relu2",), "each": ("relu1", "relu2")}
    return Task(mlp((64, 128, 64, 10)), *free_data.digits(), cuts, adam(steps, 64))


_CNN_CUTS = {"convolutions": ("flat",), "hidden": ("relu3",), "both": ("flat", "relu3")}


def mnist_rotated(steps: int = 400) -> Task:
    """The pretrained CNN meets digits turned by 45 degrees.

    `convolutions`: both of them apart from the dense layers; `hidden`: the last apart.
    46.0 -> 91.8.
    """
    train, test = (part.rotated() for part in free_data.mnist_adaptation())
    return Task(shipped("mnist_cnn"), train, test, _CNN_CUTS, adam(steps, 32))


def mnist_inverted(steps: int = 400, lr: float = 3e-3) -> Task:
    """The pretrained CNN meets black on white; cuts as in `mnist_rotated`.

    6.5 -> 90.7; after 1,200 steps at a rate of 1e-3 91.1.
    """
    train, test = (part.inverted() for part in free_data.mnist_adaptation())
    return Task(shipped("mnist_cnn"), train, test, _CNN_CUTS, adam(steps, 32, lr))


def mnist_deep_mlp(steps: int = 1000) -> Task:
    """784-128x5-10 from scratch; `middle`: layers 1, 2 | 3, 4 | 5, 6; `half`: 3 | 3.

    10 -> 95.7.
    """
    train, test = (part.flat() for part in free_data.mnist())
    cuts = {"middle": ("relu2", "relu4"), "half": ("relu3",), "last": ("relu5",)}
    model = mlp((784, *[128] * 5, 10))
    return Task(model, train, test, cuts, adam(steps, 64))


def mnist_mlp(steps: int = 400) -> Task:
    """784-128-10 from scratch, its first layer large: what tensor trains compress.

    10 -> 94.3; with the first layer frozen 81.3, after 2,000 steps 87.1.
    """
    train, test = (part.flat().standardised() for part in free_data.mnist())
    return Task(mlp((784, 128, 10)), train, test, {"last": ("relu1",)}, adam(steps, 64))


def mnist_mobilenet(steps: int = 200, batchnorm: str = "train") -> Task:
    """A MobileNetV2 from scratch; `first`: the stem and blocks 1 and 2 apart.

    10 -> 92.8; in one microbatch 93.4; with `batchnorm` ``"frozen"`` 91.3, its statistics
    then being a mean of 0 and a variance of 1.
    """
    net = MobileNet((1, 28, 28), (24, 24, 32, 32, 48, 48), mix=128, classes=10)
    recipe = msgspec.structs.replace(adam(steps, 32), batchnorm=batchnorm)
    return Task(net.model(), *free_data.mnist(), {"first": ("block2",)}, recipe)


def watch_transformer(person: int = 0, steps: int = 100) -> Task:
    """The pretrained transformer meets a person; `first`: the embedding and block 1 apart.

    `first_two`: blocks 1 and 2 apart from 3; `middle`: 1 | 2 | 3. Persons 0, 4 and 8:
    85.2 -> 95.8, 89.9 -> 94.3, 88.4 -> 98.7.
    """
    cuts = {"first": ("block1",), "first_two": ("block2",), "middle": ("block1", "block2")}
    data = free_data.watch_adaptation(person)
    return Task(shipped("watch_transformer"), *data, cuts, adam(steps, 32, 1e-3))


def watch_mobilenet(person: int = 0, steps: int = 100) -> Task:
    """The pretrained 1-D MobileNetV2 meets a person; its statistics stay as they are.

    `first`: the stem and blocks 1 and 2 apart; `middle`: these | 3, 4 | 5 and the rest.
    Persons 0, 4 and 8: 87.8 -> 97.7, 86.3 -> 94.3, 81.8 -> 98.7.
    """
    cuts = {"first": ("block2",), "middle": ("block2", "block4")}
    recipe = msgspec.structs.replace(adam(steps, 32, 1e-3), batchnorm="frozen")
    data = free_data.watch_adaptation(person)
    return Task(shipped("watch_mobilenet"), *data, cuts, recipe)


TASKS: Mapping[str, Callable[[], Task]] = {
    "digits_mlp": digits_mlp,
    "mnist_rotated": mnist_rotated,
    "mnist_inverted": mnist_inverted,
    "mnist_deep_mlp": mnist_deep_mlp,
    "mnist_mlp": mnist_mlp,
    "mnist_mobilenet": mnist_mobilenet,
    "watch_transformer": watch_transformer,
    "watch_mobilenet": watch_mobilenet,
}
