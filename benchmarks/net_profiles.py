"""MobileNetV2 and ResNet-50 as a planner sees them: flop, traffic and bytes, from shapes.

Nothing is timed: a device is its flop a second and its memory's bytes a second, and a layer
takes the sum of both. So a depthwise convolution, which computes little and reads much, is
not taken for free, nor is a batch normalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

FLOAT_BYTES: Final = 4
# Weights, gradient, that of one microbatch, momentum, and two commits of the weights.
BUFFERS: Final = 6
BACKWARD_TO_FORWARD: Final = 2.0


@dataclass(frozen=True)
class Unit:
    """What lies between two neighbouring cuts; numbers are of one sample.

    Attributes:
        flop: forward, a multiply-add is two.
        moved: elements read and written, weights left out.
        weights: elements that are trained.
        stash: elements kept for the backward.
        output: elements at the cut after it.
    """

    name: str
    flop: float
    moved: float
    weights: int
    stash: int
    output: int


@dataclass(frozen=True)
class Processor:
    """A device's; each is in units a second."""

    flop_per_s: float
    bytes_per_s: float

    def forward_s(self, unit: Unit, samples: float) -> float:
        """Of a microbatch: computing, and moving activations and weights."""
        moved_bytes = FLOAT_BYTES * (unit.moved * samples + unit.weights)
        return unit.flop * samples / self.flop_per_s + moved_bytes / self.bytes_per_s

    def update_s(self, weights: int) -> float:
        """Of momentum: reads three buffers, writes two."""
        return 5 * FLOAT_BYTES * weights / self.bytes_per_s


@dataclass
class _Tracer:
    """Follows the shapes through a network and adds up what each unit costs."""

    channels: int
    size: int
    units: list[Unit] = field(default_factory=list)
    flop: float = 0.0
    moved: float = 0.0
    weights: int = 0
    stash: int = 0

    def conv(self, out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        """A convolution with batch normalisation and, or not, an activation."""
        before = self.channels * self.size**2
        taps = self.channels // groups * kernel**2
        self.size = -(-self.size // stride)
        self.channels = out
        after = out * self.size**2
        self.flop += 2.0 * after * taps + 4.0 * after
        self.moved += before + after + 2 * after + 2 * after
        self.weights += out * taps + 2 * out
        self.stash += before + after

    def pool(self, kernel: int, stride: int) -> None:
        before = self.channels * self.size**2
        self.size = -(-self.size // stride)
        after = self.channels * self.size**2
        self.flop += float(after * kernel**2)
        self.moved += before + after
        self.stash += before

    def add(self) -> None:
        """A residual sum."""
        self.flop += self.channels * self.size**2
        self.moved += 3 * self.channels * self.size**2

    def classify(self, classes: int) -> None:
        """Mean over the image, then a dense layer."""
        self.flop += self.channels * self.size**2 + 2.0 * self.channels * classes
        self.moved += self.channels * (self.size**2 + 1) + classes
        self.weights += (self.channels + 1) * classes
        self.stash += self.channels
        self.channels, self.size = classes, 1

    def cut(self, name: str) -> None:
        output = self.channels * self.size**2
        unit = Unit(name, self.flop, self.moved, self.weights, self.stash, output)
        self.units.append(unit)
        self.flop, self.moved, self.weights, self.stash = 0.0, 0.0, 0, 0


def mobilenet_v2(size: int) -> tuple[Unit, ...]:
    """Source: Sandler et al., MobileNetV2, CVPR 2018, table 2; 1000 classes."""
    net = _Tracer(3, size)
    net.conv(32, 3, 2)
    net.cut("stem")
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2))
    for expand, out, repeat, first in (
        *rows,
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for index in range(repeat):
            stride, same = (first if index == 0 else 1), net.channels == out
            wide = net.channels * expand
            if expand > 1:
                net.conv(wide)
            net.conv(wide, 3, stride, groups=wide)
            net.conv(out)
            if same and stride == 1:
                net.add()
            net.cut(f"block {len(net.units)}")
    net.conv(1280)
    net.classify(1000)
    net.cut("head")
    return tuple(net.units)


def resnet_50(size: int) -> tuple[Unit, ...]:
    """Source: He et al., Deep Residual Learning, CVPR 2016; strides in the 3x3."""
    net = _Tracer(3, size)
    net.conv(64, 7, 2)
    net.pool(3, 2)
    net.cut("stem")
    for width, repeat, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(repeat):
            stride = first if index == 0 else 1
            channels, before = net.channels, net.size
            net.conv(width)
            net.conv(width, 3, stride)
            net.conv(4 * width)
            if index == 0:
                net.channels, net.size = channels, before
                net.conv(4 * width, 1, stride)
            net.add()
            net.cut(f"block {len(net.units)}")
    net.classify(1000)
    net.cut("head")
    return tuple(net.units)


NETS: Final[Mapping[str, Callable[[int], tuple[Unit, ...]]]] = {
    "MobileNetV2": mobilenet_v2,
    "ResNet-50": resnet_50,
}
