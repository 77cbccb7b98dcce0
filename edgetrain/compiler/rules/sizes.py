"""The sizes of a convolution."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.window import Window, window


@dataclass(frozen=True, slots=True)
class Correlation:
    """The sizes of a convolution from [N, C, *image] to [N, M, *steps]."""

    batch: int
    channels: int
    features: int
    groups: int
    window: Window

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.features, self.channels // self.groups, *self.window.kernel)

    @property
    def positions(self) -> int:
        return math.prod(self.window.steps)

    @property
    def depthwise(self) -> bool:
        return self.groups == self.channels == self.features and self.groups > 1


def conv_sizes(g: GraphBuilder, node: Node) -> Correlation:
    x, w = (g.shape(name) for name in node.inputs[:2])
    steps = g.shape(node.output)[2:]
    return Correlation(
        x[0], x[1], w[0], int(node.get("group", 1)), window(node, x[2:], steps, w[2:])
    )
