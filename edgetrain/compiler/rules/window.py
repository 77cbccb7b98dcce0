"""Where the windows of a convolution or a pool lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edgetrain.compiler.build import Attribute, GraphBuilder, Node
from edgetrain.compiler.rules.shaping import Shape


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding windows over an image: the spatial axes only.

    Attributes:
        image: extents of what the windows slide over.
        steps: how many windows there are along each axis.
        kernel, strides, dilations: as in ONNX.
        begin, end: padding before and after the image.
    """

    image: Shape
    steps: Shape
    kernel: Shape
    strides: Shape
    dilations: Shape
    begin: Shape
    end: Shape

    @property
    def taps(self) -> Iterator[tuple[int, ...]]:
        """The offsets of the kernel's elements from a window's start, row-major."""
        offsets = (
            range(0, k * d, d) for k, d in zip(self.kernel, self.dilations, strict=True)
        )
        return itertools.product(*offsets)

    @property
    def tiles(self) -> bool:
        """The windows cover the image exactly, without overlap or padding."""
        return (
            tuple(self.kernel) == tuple(self.strides)
            and all(d == 1 for d in self.dilations)
            and not any((*self.begin, *self.end))
            and all(
                i == s * k
                for i, s, k in zip(self.image, self.steps, self.kernel, strict=True)
            )
        )

    @property
    def points(self) -> bool:
        """One element a window, one window an element: a 1x1 kernel of stride 1."""
        return all(k == 1 for k in self.kernel) and tuple(self.image) == tuple(self.steps)

    @property
    def reach(self) -> tuple[int, ...]:
        """How far a window extends beyond its first element."""
        return tuple((k - 1) * d for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def span(self) -> tuple[int, ...]:
        """From the first element of the first window to the last of the last."""
        return tuple(
            (n - 1) * s + r + 1
            for n, s, r in zip(self.steps, self.strides, self.reach, strict=True)
        )

    @property
    def turns(self) -> bool:
        """Stride 1 and padding no wider than the kernel.

        Going back to the image is then sliding the kernel, turned around, over the windows.
        """
        padded = (*self.begin, *self.end)
        limits = (*self.reach, *self.reach)
        return all(s == 1 for s in self.strides) and all(
            pad <= limit for pad, limit in zip(padded, limits, strict=True)
        )

    def transposed(self) -> Mapping[str, Attribute]:
        """Attributes of the ConvTranspose that goes from windows back to the image."""
        end, output_padding = [], []
        for axis, extent in enumerate(self.image):
            spread = (self.steps[axis] - 1) * self.strides[axis]
            reach = spread + (self.kernel[axis] - 1) * self.dilations[axis] + 1
            surplus = reach - self.begin[axis] - extent
            end.append(max(0, surplus))
            output_padding.append(max(0, -surplus))
        return {
            "kernel_shape": list(self.kernel),
            "strides": list(self.strides),
            "dilations": list(self.dilations),
            "pads": [*self.begin, *end],
            "output_padding": output_padding,
        }

    def padded(self, g: GraphBuilder, image: str, *, first_axis: int = 2) -> str:
        """Pad an [N, C, *image] value with zeros; [N, *image, C] with `first_axis` 1."""
        if not any((*self.begin, *self.end)):
            return image
        before, after = [0] * first_axis, [0] * (2 - first_axis)
        return g(
            "Pad", image, g.ints(*before, *self.begin, *after, *before, *self.end, *after)
        )

    def tap(
        self, g: GraphBuilder, padded: str, offset: Shape, *, first_axis: int = 2
    ) -> str:
        """What each window holds at `offset`: [N, C, *steps].

        Args:
            g: where to emit.
            padded: the padded image.
            offset: one of `taps`.
            first_axis: of the spatial ones, which follow one another.
        """
        ends = [
            o + (n - 1) * s + 1
            for o, n, s in zip(offset, self.steps, self.strides, strict=True)
        ]
        axes = range(first_axis, first_axis + len(ends))
        if all(s == 1 for s in self.strides):
            return g("Slice", padded, g.ints(*offset), g.ints(*ends), g.ints(*axes))
        return g(
            "Slice", padded, g.ints(*offset), g.ints(*ends), g.ints(*axes),
            g.ints(*self.strides),
        )  # fmt: skip


def window(node: Node, image: Shape, steps: Shape, kernel: Shape) -> Window:
    """Read the window of a Conv or pool node, with automatic padding resolved."""
    rank = len(kernel)
    strides = tuple(node.get("strides", [1] * rank))
    dilations = tuple(node.get("dilations", [1] * rank))
    pads = tuple(node.get("pads", [0] * (2 * rank)))
    begin, end = pads[:rank], pads[rank:]
    automatic = node.get("auto_pad", "NOTSET")
    if automatic == "VALID":
        begin = end = (0,) * rank
    elif automatic in ("SAME_UPPER", "SAME_LOWER"):
        total = [
            max(0, (steps[i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1 - n)
            for i, n in enumerate(image)
        ]
        small, large = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        begin, end = (small, large) if automatic == "SAME_UPPER" else (large, small)
    return Window(tuple(image), tuple(steps), tuple(kernel), strides, dilations, begin, end)
