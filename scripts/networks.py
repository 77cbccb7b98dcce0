"""The networks that `export_models.py` exports: one of each family that people train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES = 10


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which convolves where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.short: nn.Module = nn.Identity()
        if stride > 1:
            conv = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.short(x))


class ResNet(nn.Sequential):
    """[N, 3, 32, 32] to [N, 10]: a stem and three residual blocks."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, 1, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            Residual(16, 16, 1),
            Residual(16, 32, 2),
            Residual(32, 64, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(64, CLASSES),
        )


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project; a shortcut where the shape stays."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.adds = stride == 1 and channels == out
        self.block = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if self.adds else self.block(x)


class MobileNet(nn.Sequential):
    """[N, 3, 32, 32] to [N, 10]: a stem and three inverted residuals."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
            InvertedResidual(8, 8, 1),
            InvertedResidual(8, 16, 2),
            InvertedResidual(16, 16, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(16, CLASSES),
        )


class UNet(nn.Module):
    """[N, 3, 32, 32] to [N, 2, 32, 32]: two levels down and up, with skip connections.

    One way up is a transposed convolution, the other resizes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down1 = self._block(3, 8)
        self.down2 = self._block(8, 16)
        self.bottom = self._block(16, 32)
        self.up2 = nn.ConvTranspose2d(32, 16, 2, 2)
        self.mix2 = self._block(32, 16)
        self.up1 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.mix1 = self._block(24, 8)
        self.head = nn.Conv2d(8, 2, 1)

    @staticmethod
    def _block(channels: int, out: int) -> nn.Sequential:
        norm = nn.InstanceNorm2d(out, affine=True)
        return nn.Sequential(nn.Conv2d(channels, out, 3, 1, 1), norm, nn.LeakyReLU(0.1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(nn.functional.max_pool2d(a, 2))
        c = self.bottom(nn.functional.max_pool2d(b, 2))
        d = self.mix2(torch.cat([self.up2(c), b], 1))
        return self.head(self.mix1(torch.cat([self.up1(d), a], 1)))


def _layers(*, norm_first: bool) -> nn.TransformerEncoder:
    """Two encoder layers of width 32; PyTorch makes the second a copy of the first."""
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
    )
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for parameter in layers.parameters():
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)
    return layers


class Encoder(nn.Module):
    """Tokens [N, T] to [N, T, 100]: a language model, its head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.position = nn.Parameter(torch.randn(16, 32) * 0.1)
        self.layers = _layers(norm_first=False)
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens) + self.position))


class ViT(nn.Module):
    """[N, 3, 32, 32] to [N, 10]: patches, a class token, two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 32) * 0.1)
        self.position = nn.Parameter(torch.randn(1, 17, 32) * 0.1)
        self.layers = _layers(norm_first=True)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        token = self.token.expand(x.shape[0], -1, -1)
        y = self.layers(torch.cat([token, patches], 1) + self.position)
        return self.head(self.norm(y[:, 0]))


class Recurrent(nn.Module):
    """Tokens [N, T] to [N, 10]: the last state of two recurrent layers."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.recurrent = recurrent
        self.head = nn.Linear(32, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        y, _ = self.recurrent(self.embed(tokens))
        return self.head(y[:, -1])


def gru() -> Recurrent:
    return Recurrent(nn.GRU(32, 32, 2, batch_first=True))


def lstm() -> Recurrent:
    return Recurrent(nn.LSTM(32, 32, 2, batch_first=True))


class BertLayer(nn.Module):
    """Attention and feed-forward, each followed by LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + bias
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.narrow(nn.functional.gelu(self.wide(x))))


class MiniLM(nn.Module):
    """Tokens and mask [N, T] to a sentence vector [N, 384]: the shape of MiniLM-L6.

    Random weights: only the architecture is that of the published model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30522, 384)
        self.positions = nn.Embedding(512, 384)
        self.norm = nn.LayerNorm(384)
        self.layers = nn.ModuleList(BertLayer(384, 12) for _ in range(6))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.positions(places))
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, bias)
        kept = mask[:, :, None].to(x.dtype)
        return (x * kept).sum(1) / kept.sum(1)
