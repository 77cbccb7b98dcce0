"""The networks that `pretrain_models.py` trains, as PyTorch modules."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import torch
from torch import Tensor, nn

CHANNELS, EXERCISES = 6, 7
PATCHES, PATCH = 20, 5


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


class WatchTransformer(nn.Module):
    """[N, 6, 100] to [N, 7]: 20 patches, 3 pre-norm encoder layers; 104,263 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(CHANNELS * PATCH, 64)
        self.position = nn.Parameter(0.02 * torch.randn(PATCHES, 64))
        self.tokens = nn.Identity()
        self.block1, self.block2, self.block3 = (
            nn.TransformerEncoderLayer(
                64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(3)
        )
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, EXERCISES)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unflatten(2, (PATCHES, PATCH)).transpose(1, 2).flatten(2)
        tokens = self.tokens(self.embed(patches) + self.position)
        return self.head(self.norm(self.block3(self.block2(self.block1(tokens)))).mean(1))


class InvertedResidual(nn.Sequential):
    """Expand fourfold, filter each channel, project; a shortcut where the shape stays."""

    def __init__(self, channels: int, out: int) -> None:
        wide, stride = 4 * channels, 1 if channels == out else 2
        super().__init__(
            OrderedDict(
                expand=nn.Conv1d(channels, wide, 1, bias=False),
                expand_norm=nn.BatchNorm1d(wide),
                expand_relu=nn.ReLU6(),
                filter=nn.Conv1d(wide, wide, 3, stride, 1, groups=wide, bias=False),
                filter_norm=nn.BatchNorm1d(wide),
                filter_relu=nn.ReLU6(),
                project=nn.Conv1d(wide, out, 1, bias=False),
                project_norm=nn.BatchNorm1d(out),
            )
        )
        self.adds = channels == out

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x + y if self.adds else y


def watch_mobilenet() -> nn.Module:
    """[N, 6, 100] to [N, 7]: MobileNetV2 in one dimension; 59,767 parameters."""
    widths = (24, 24, 32, 32, 48, 48)
    blocks = {
        f"block{number}": InvertedResidual(*pair)
        for number, pair in enumerate(itertools.pairwise(widths), 1)
    }
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv1d(CHANNELS, 24, 5, 2, 2, bias=False),
            stem_norm=nn.BatchNorm1d(24),
            stem_relu=nn.ReLU6(),
            **blocks,
            mix=nn.Conv1d(48, 128, 1, bias=False),
            mix_norm=nn.BatchNorm1d(128),
            mix_relu=nn.ReLU6(),
            pool=nn.AdaptiveAvgPool1d(1),
            flat=nn.Flatten(),
            head=nn.Linear(128, EXERCISES),
        )
    )
