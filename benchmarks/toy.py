"""A network too small to count: its step makes a framework load what it loads late."""

from __future__ import annotations

from torch import nn

INPUTS = 8
CLASSES = 10
BATCH = 4


def toy() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.ReLU(), nn.Linear(8, CLASSES))
