"""Col2Im: overlapping blocks added up to an image."""

from __future__ import annotations

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents
from edgetrain.compiler.rules.shaping import reshape
from edgetrain.compiler.rules.window import Window


def col2im_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Cut the image into its blocks again, one slice a tap."""
    x = node.inputs[0]
    w = _window(g, node)
    n, channels = g.shape(node.output)[:2]
    padded = w.padded(g, dy)
    shape = (n, channels, 1, g.shape(x)[-1])
    taps = [reshape(g, w.tap(g, padded, offset), shape) for offset in w.taps]
    blocks = g("Concat", *taps, axis=2)
    return (reshape(g, blocks, g.shape(x)),)


def _window(g: GraphBuilder, node: Node) -> Window:
    image, kernel = (tuple(g.value(name).tolist()) for name in node.inputs[1:3])
    rank = len(image)
    strides, dilations = (
        tuple(node.get(name, [1] * rank)) for name in ("strides", "dilations")
    )
    pads = tuple(node.get("pads", [0] * (2 * rank)))
    begin, end = pads[:rank], pads[rank:]
    spare = (
        image[i] + begin[i] + end[i] - (kernel[i] - 1) * dilations[i] - 1
        for i in range(rank)
    )
    steps = tuple(room // stride + 1 for room, stride in zip(spare, strides, strict=True))
    return Window(image, steps, kernel, strides, dilations, begin, end)
