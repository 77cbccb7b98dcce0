"""Train the networks that tests of backprop-free training start from.

They are committed in `tests/data`, so this is needed only to check where they come from.
Needs PyTorch (``make oracle`` installs it) and the data of `fetch_inputs.py`. Seeds are
fixed; another version of PyTorch or another processor rounds differently.

Run as ``PYTHONPATH=tests python scripts/pretrain_models.py [--out DIR] [NAME ...]``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import free_data
import numpy as np
import torch
from free_data import Samples
from named_export import export
from pretrained_networks import WatchTransformer, mnist_cnn, watch_mobilenet
from torch import nn

BATCH: Final = 64
OUT: Final = Path(__file__).resolve().parent.parent / "tests" / "data"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a network is trained.

    Attributes:
        make: builds it, with random weights.
        data: what it is trained on, and what it is tried on.
        named: submodules whose names what they return has in the ONNX file.
        steps: with AdamW, its learning rate `lr` falling to 0 as a cosine.
        seed: of the weights, and of the order of the samples.
        dynamo: how it is exported.
    """

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Samples, Samples]]
    named: Sequence[str]
    steps: int
    lr: float = 3e-3
    weight_decay: float = 0.05
    seed: int = 0
    dynamo: bool = False


def _upright() -> tuple[Samples, Samples]:
    return free_data.mnist_pretraining(), free_data.mnist()[1]


def _watches() -> tuple[Samples, Samples]:
    """The second: what the people who are held out did in the second halves."""
    parts = [free_data.watch_adaptation(person)[1] for person in free_data.HELD_OUT_PEOPLE]
    held_out = Samples(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    return free_data.watch_pretraining(), held_out


_CNN_NAMES: Final = ("conv1", "relu1", "conv2", "relu2", "flat", "fc1", "relu3")
_BLOCKS: Final = tuple(f"block{number}" for number in range(1, 6))
RECIPES: Final[Mapping[str, Recipe]] = {
    "mnist_cnn": Recipe(
        mnist_cnn,
        _upright,
        _CNN_NAMES,
        steps=1500,
        seed=1,
    ),
    "watch_transformer": Recipe(
        WatchTransformer,
        _watches,
        ("tokens", *_BLOCKS[:3], "norm"),
        steps=700,
        lr=1e-3,
        dynamo=True,
    ),
    "watch_mobilenet": Recipe(
        watch_mobilenet, _watches, ("stem_relu", *_BLOCKS, "mix_relu", "flat"), 700
    ),
}


def train(module: nn.Module, samples: Samples, recipe: Recipe) -> None:
    torch.manual_seed(recipe.seed)
    x, labels = (torch.from_numpy(array) for array in samples)
    optimizer = torch.optim.AdamW(
        module.parameters(), recipe.lr, weight_decay=recipe.weight_decay
    )
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    module.train()
    rows = torch.randperm(len(x))
    for _ in range(recipe.steps):
        if len(rows) < BATCH:
            rows = torch.randperm(len(x))
        batch, rows = rows[:BATCH], rows[BATCH:]
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x[batch]), labels[batch]).backward()
        optimizer.step()
        cosine.step()
    module.eval()


@torch.no_grad()
def accuracy(module: nn.Module, samples: Samples) -> float:
    x, labels = (torch.from_numpy(array) for array in samples)
    return (module(x).argmax(1) == labels).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    parser.add_argument("names", nargs="*", choices=[[], *RECIPES], metavar="NAME")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.names or RECIPES:
        recipe = RECIPES[name]
        torch.manual_seed(recipe.seed)
        module = recipe.make()
        samples, held_out = recipe.data()
        train(module, samples, recipe)
        path = arguments.out / f"{name}.onnx"
        sample = torch.from_numpy(held_out.x[:3])
        path.write_bytes(export(module, sample, recipe.named, dynamo=recipe.dynamo))
        print(
            f"{path}: {path.stat().st_size} B,"
            f" {sum(p.numel() for p in module.parameters())} parameters,"
            f" accuracy {accuracy(module, held_out):.4f}"
        )


if __name__ == "__main__":
    main()
