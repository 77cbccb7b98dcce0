"""Convolutions in the engine's own layout, channels in blocks.

ONNX Runtime's CPU build has convolution kernels for images stored as [N, C / b, H, W, b],
with b set by the processor. Their weights may be computed at run time. They are not part
of ONNX, so graphs that use them are an alternative beside the portable ones, and a device
takes it only after it has compared the two.

A value in that layout keeps its declared shape [N, C, H, W].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.shaping import reshape
from edgetrain.compiler.rules.sizes import Correlation, conv_sizes

DOMAIN: Final = "com.microsoft.nchwc"
REORDER_INPUT: Final = f"{DOMAIN}::ReorderInput"
REORDER_OUTPUT: Final = f"{DOMAIN}::ReorderOutput"
CONV: Final = f"{DOMAIN}::Conv"
# A dense weight is put in blocks at every run, which pays from so many positions on.
POSITIONS: Final = 512
# A dense weight gradient reads a block of samples of the cotangent once for a few columns
# of results, for up to so many blocks of features at a time. It must stay in the cache.
# So that it does, and to fill blocks of samples, images are cut into a few bands of rows.
FEATURE_BLOCKS: Final = 4
CACHE_BYTES: Final = 2**21
BANDS: Final = 8


def use_blocks(g: GraphBuilder, nodes: Sequence[Node]) -> list[Node]:
    """The forward nodes to run: convolutions in blocks where that pays, others as they are.

    Values keep their names, so the result is differentiated through `nodes`.
    """
    emitted: list[Node] = []
    for node in nodes:
        if g.block and node.op_type == "Conv" and _fits_forward(g, node):
            inner = g.subgraph()
            _forward(inner, node)
            emitted += inner.nodes
        else:
            emitted.append(node)
    return emitted


def fits_dx(g: GraphBuilder, w: str, c: Correlation) -> bool:
    """Whether `dx` serves."""
    positions = c.batch * math.prod(c.window.image)
    return c.window.turns and _fits(g, w, c, positions)


def fits_depthwise_dw(g: GraphBuilder, w: str, c: Correlation) -> bool:
    """Whether `depthwise_dw` serves."""
    return c.depthwise and _fits(g, w, c)


def fits_dense_dw(g: GraphBuilder, w: str, c: Correlation) -> bool:
    """Whether `dense_dw` serves."""
    return (
        g.block > 0
        and not g.lean
        and c.groups == 1
        and len(c.window.kernel) == 2
        and math.prod(c.window.kernel) > 1
        and c.window.dilations[1] == 1
        and c.features % g.block == 0
        and g.dtype(w) == "float32"
        and _bands(g, c) > 0
    )


def dx(g: GraphBuilder, w: str, dy: str, c: Correlation) -> str:
    """For stride 1: the convolution of dy with the kernel turned around.

    Args:
        g: where to emit.
        w: weight [M, C / groups, *kernel].
        dy: cotangent of the result, [N, M, *steps].
        c: the sizes.
    """
    window, reach = c.window, c.window.reach
    pads = [r - b for r, b in zip(reach, window.begin, strict=True)]
    pads += [r - e for r, e in zip(reach, window.end, strict=True)]
    weight = _depthwise_weight(g, w, c, turned=True) if c.depthwise else _dx_weight(g, w, c)
    image = g(
        CONV, g(REORDER_INPUT, dy), weight,
        group=c.groups, kernel_shape=list(window.kernel), pads=pads,
        strides=[1, 1], dilations=list(window.dilations),
    )  # fmt: skip
    return g(REORDER_OUTPUT, image, channels=c.channels)


def depthwise_dw(g: GraphBuilder, x: str, dy: str, c: Correlation) -> str:
    """The weight gradient as one depthwise convolution over N * C channels.

    The image is convolved with the cotangent as its kernel, the stride as its dilation;
    that gives kernel [N * C, *kernel], which is summed over N. The direct kernel copies
    no taps, which is what the portable form spends its time on.

    Args:
        g: where to emit.
        x: image [N, C, *image].
        dy: cotangent of the result, [N, C, *steps].
        c: the sizes.
    """
    window, planes = c.window, c.batch * c.channels
    image = g(REORDER_INPUT, reshape(g, x, (1, planes, *window.image)))
    kernel = g(REORDER_INPUT, reshape(g, dy, (1, planes, *window.steps)))
    product = g(
        CONV, image, reshape(g, kernel, (planes, 1, *window.steps)),
        group=planes, kernel_shape=list(window.steps),
        pads=[*window.begin, *window.end],
        strides=list(window.dilations), dilations=list(window.strides),
    )  # fmt: skip
    plain = g(REORDER_OUTPUT, product, channels=planes)
    taps = g("Slice", plain, g.ints(0, 0), g.ints(*window.kernel), g.ints(2, 3))
    split = reshape(g, taps, (c.batch, *c.weight_shape))
    return g("ReduceSum", split, g.ints(0), keepdims=0)


def dense_dw(g: GraphBuilder, x: str, dy: str, c: Correlation) -> str:
    """The weight gradient as one convolution that sums over samples as over channels.

    The image is convolved with the cotangent as its kernel, the stride as its dilation.
    Pixels and channels of the image share its last axis, channels innermost, so that the
    results of all channels lie side by side: the kernel of the engine works on several at
    once and reads the cotangent once for all of them. It takes results that touch padding
    one at a time, so the padding is made part of the image.

    Args:
        g: where to emit.
        x: image [N, C, *image].
        dy: cotangent of the result, [N, M, *steps].
        c: the sizes.
    """
    window, count = c.window, _bands(g, c)
    steps = (window.steps[0] // count, window.steps[1])
    product = g(
        CONV, _image_bands(g, x, c, count), _cotangent_bands(g, dy, c, count),
        group=1, kernel_shape=list(steps), pads=[0] * 4,
        strides=[window.dilations[0], 1],
        dilations=[window.strides[0], window.strides[1] * c.channels],
    )  # fmt: skip
    plain = g(REORDER_OUTPUT, product, channels=c.features)
    taps = reshape(g, plain, (c.features, *window.kernel, c.channels))
    return g("Transpose", taps, perm=[0, 3, 1, 2])


def _bands(g: GraphBuilder, c: Correlation) -> int:
    """Of how many bands of rows each, images make whole blocks of samples; 0: of none."""
    features = min(c.features, FEATURE_BLOCKS * g.block)
    image_bytes = 4 * g.block * features * c.positions
    for count in range(1, BANDS + 1):
        whole = c.window.steps[0] % count == 0 and c.batch * count % g.block == 0
        if whole and image_bytes <= count * CACHE_BYTES:
            return count
    return 0


def _image_bands(g: GraphBuilder, x: str, c: Correlation, count: int) -> str:
    """[N, C, H, W] as [S / b, rows, columns * C, b of S], S the bands of all samples.

    Padded, without what no window reaches; declared [1, S, rows, columns * C].
    """
    window, band = c.window, c.window.steps[0] // count
    stride = window.strides[0]
    rows = (band - 1) * stride + window.reach[0] + 1
    width = window.span[1]
    bottom, right = (
        span - image - begin
        for span, image, begin in zip(window.span, window.image, window.begin, strict=True)
    )
    image = g("Transpose", x, perm=[0, 2, 3, 1])
    if any((*window.begin, bottom, right)):
        image = g("Pad", image, g.ints(0, *window.begin, 0, 0, bottom, right, 0))
    if count > 1:
        starts = range(0, window.steps[0] * stride, band * stride)
        bands = [g("Slice", image, g.ints(s), g.ints(s + rows), g.ints(1)) for s in starts]
        image = g("Concat", *bands, axis=0)
    return g(
        REORDER_INPUT, reshape(g, image, (1, count * c.batch, rows, width * c.channels))
    )


def _cotangent_bands(g: GraphBuilder, dy: str, c: Correlation, count: int) -> str:
    """[N, M, *steps] as [M / b, S / b, *steps, b of S, b of M], declared [M, S, *steps]."""
    b, samples, positions = g.block, c.batch * count, c.positions // count
    steps = (c.window.steps[0] // count, c.window.steps[1])
    if count > 1:
        planes = reshape(g, dy, (c.batch * c.features, count, positions))
        dy = g("Transpose", planes, perm=[1, 0, 2])
    if c.features == b:
        rows = reshape(g, dy, (samples // b, b * b, positions))
        kernel = g("Transpose", rows, perm=[0, 2, 1])
    else:
        image = dy if count == 1 else reshape(g, dy, (samples, c.features, *steps))
        blocks = (samples // b, b, c.features // b, positions, b)
        split = reshape(g, g(REORDER_INPUT, image), blocks)
        kernel = g("Transpose", split, perm=[2, 0, 3, 1, 4])
    return reshape(g, kernel, (c.features, samples, *steps))


def _forward(g: GraphBuilder, node: Node) -> None:
    c = conv_sizes(g, node)
    window = c.window
    x, w, *bias = node.inputs
    weight = _depthwise_weight(g, w, c) if c.depthwise else _forward_weight(g, w, c)
    y = g(
        CONV, g(REORDER_INPUT, x), weight, *bias,
        group=c.groups, kernel_shape=list(window.kernel),
        pads=[*window.begin, *window.end], strides=list(window.strides),
        dilations=list(window.dilations),
    )  # fmt: skip
    attributes = {"channels": c.features}
    name = f"{node.name}/plain"
    g.append(Node("ReorderOutput", name, (y,), node.outputs, attributes, DOMAIN))


def _fits_forward(g: GraphBuilder, node: Node) -> bool:
    c = conv_sizes(g, node)
    return _fits(g, node.inputs[1], c, c.batch * c.positions)


def _fits(g: GraphBuilder, w: str, c: Correlation, positions: int = 0) -> bool:
    """Images of float32, whole blocks, and depthwise or worth the weight's reordering."""
    dense = c.groups == 1 and not c.window.points and positions >= POSITIONS
    return (
        g.block > 0
        and (c.depthwise or dense)
        and len(c.window.kernel) == 2
        and c.channels % g.block == 0
        and c.features % g.block == 0
        and g.dtype(w) == "float32"
    )


def _depthwise_weight(
    g: GraphBuilder, w: str, c: Correlation, *, turned: bool = False
) -> str:
    """[C, 1, *kernel] in blocks of channels, the kernel turned around if wanted."""
    taps = math.prod(c.window.kernel)
    rows = reshape(g, w, (c.channels // g.block, g.block, taps))
    if turned:
        rows = g("Gather", rows, g.ints(*reversed(range(taps))), axis=2)
    return reshape(g, g("Transpose", rows, perm=[0, 2, 1]), c.weight_shape)


def _forward_weight(g: GraphBuilder, w: str, c: Correlation) -> str:
    """[M, C, *kernel] as [M / b, C / b, *kernel, b of C, b of M].

    In two steps, each of which moves one axis: four times as fast as one transpose.
    """
    b, taps = g.block, math.prod(c.window.kernel)
    rows = reshape(g, w, (c.features // b, b, c.channels * taps))
    features_last = g("Transpose", rows, perm=[0, 2, 1])
    planes = reshape(g, features_last, (-1, b, taps, b))
    return reshape(g, g("Transpose", planes, perm=[0, 2, 1, 3]), c.weight_shape)


def _dx_weight(g: GraphBuilder, w: str, c: Correlation) -> str:
    """As `_forward_weight`, with M and C exchanged and the kernel turned around."""
    b, taps = g.block, math.prod(c.window.kernel)
    split = reshape(g, w, (c.features, c.channels // b, b, taps))
    channels_last = g("Transpose", split, perm=[0, 1, 3, 2])
    turned = g("Gather", channels_last, g.ints(*reversed(range(taps))), axis=2)
    blocks = reshape(g, turned, (c.features // b, b, c.channels // b, taps, b))
    moved = g("Transpose", blocks, perm=[2, 0, 3, 1, 4])
    return reshape(g, moved, (c.channels, c.features, *c.window.kernel))
