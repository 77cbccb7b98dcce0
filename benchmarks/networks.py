"""The networks that step times are compared on, as PyTorch modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES = 10


def conv_norm(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Module:
    padding = kernel // 2
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, CLASSES),
    )


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, CLASSES),
    )


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = conv_norm(inputs, outputs, 3, stride)
        self.second = conv_norm(outputs, outputs, 3)
        same = stride == 1 and inputs == outputs
        self.short = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.short(x))


class ResNet(nn.Module):
    """ResNet-18's blocks at a quarter of its width, for 32x32 images."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 16, 32, 32, 64, 64, 128, 128)
        strides = (1, 1, 2, 1, 2, 1, 2, 1)
        blocks, before = [], 16
        for width, stride in zip(widths, strides, strict=True):
            blocks.append(BasicBlock(before, width, stride))
            before = width
        self.stem = conv_norm(3, 16, 3)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int = 6) -> None:
        super().__init__()
        wide = expansion * inputs
        self.adds = stride == 1 and inputs == outputs
        self.block = nn.Sequential(
            conv_norm(inputs, wide, 1),
            nn.ReLU6(),
            conv_norm(wide, wide, 3, stride, groups=wide),
            nn.ReLU6(),
            conv_norm(wide, outputs, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if self.adds else self.block(x)


class MobileNetV2(nn.Module):
    """A stem and five inverted residuals, for 64x64 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(3, 16, 3, 2)
        self.blocks = nn.Sequential(
            InvertedResidual(16, 16, 1),
            InvertedResidual(16, 24, 2),
            InvertedResidual(24, 24, 1),
            InvertedResidual(24, 32, 2),
            InvertedResidual(32, 32, 1),
        )
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(nn.functional.relu6(self.stem(x))).mean((2, 3)))


class Encoder(nn.Module):
    """Two pre-norm transformer layers of width 128 on 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        layers = (
            nn.TransformerEncoderLayer(
                128,
                4,
                256,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(2)
        )
        self.embed = nn.Linear(32, 128)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)).mean(1))


class GRUClassifier(nn.Module):
    """A GRU of 64 units over 50 steps; the last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 64, batch_first=True)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])


class UNet(nn.Module):
    """Two levels down and up with skip connections; classified by its mean map."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = conv_norm(3, 16, 3), conv_norm(16, 32, 3)
        self.bottom = conv_norm(32, 64, 3)
        self.up2 = nn.ConvTranspose2d(64, 32, 2, 2)
        self.mix2 = conv_norm(64, 32, 3)
        self.up1 = nn.ConvTranspose2d(32, 16, 2, 2)
        self.mix1 = conv_norm(32, 16, 3)
        self.head = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.down1(x))
        b = torch.relu(self.down2(nn.functional.max_pool2d(a, 2)))
        c = torch.relu(self.bottom(nn.functional.max_pool2d(b, 2)))
        d = torch.relu(self.mix2(torch.cat([self.up2(c), b], 1)))
        e = torch.relu(self.mix1(torch.cat([self.up1(d), a], 1)))
        return self.head(e).mean((2, 3))


@dataclass(frozen=True, slots=True)
class Network:
    """How to make a network, and the shape of one of its samples."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


NETWORKS: Mapping[str, Network] = {
    "mlp": Network(mlp, (784,)),
    "lenet": Network(lenet, (1, 28, 28)),
    "resnet": Network(ResNet, (3, 32, 32)),
    "mobilenet": Network(MobileNetV2, (3, 64, 64)),
    "encoder": Network(Encoder, (64, 32)),
    "gru": Network(GRUClassifier, (50, 16)),
    "unet": Network(UNet, (3, 32, 32)),
}
