"""The networks that `pretrain_models.py` trains, as PyTorch modules."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def mnist_cnn() -> nn.Module:
    """[N, 1, 28, 28] to [N, 10]: two convolutions, two dense layers; 26,826 parameters."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 8, 5, 2, padding=2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(8, 16, 3, 2, padding=1),
            relu2=nn.ReLU(),
            flat=nn.Flatten(),
            fc1=nn.Linear(16 * 7 * 7, 32),
            relu3=nn.ReLU(),
            fc2=nn.Linear(32, 10),
        )
    )
