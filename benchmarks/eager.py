"""PyTorch eager, the measure of every step benchmark, and rounds interleaved with it.

Imports nothing of edgetrain, so that another runtime's own environment can share it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import networks
import torch
from torch import Tensor, nn

LR = 1e-3
SEED = 0
# A round repeats a step until eager has run about so long.
ROUND_S = 0.02
Step = Callable[[], object]


def draw(name: str, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, its inputs and labels: the same in every process."""
    torch.manual_seed(SEED)
    network = networks.NETWORKS[name]
    model = network.make()
    x = torch.randn(batch, *network.shape)
    return model, x, torch.randint(networks.CLASSES, (batch,))


def eager_step(model: nn.Module, x: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """A step of SGD by PyTorch; it returns the loss before the update."""
    optimizer = torch.optim.SGD(model.parameters(), LR)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch gives it no types
        optimizer.step()
        return loss.detach()

    return step


def interleave(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, a few runs a round, after a warm-up."""
    for step in steps.values():
        for _ in range(3):
            step()
    start = time.perf_counter()
    steps["eager"]()
    repeats = max(1, int(ROUND_S / max(time.perf_counter() - start, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(repeats):
                step()
            times[name].append((time.perf_counter() - start) / repeats)
    return times
