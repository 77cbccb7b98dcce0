"""Weight gradients by the engine's own convolutions, beside those of the portable form."""

from __future__ import annotations

import numpy as np
import pytest
from forward_graph import Graph, node, normal
from stage_runs import ENGINE

from edgetrain.compiler.build import live_nodes
from edgetrain.compiler.rules.blocked import CACHE_BYTES, DOMAIN
from edgetrain.compiler.vjp import vjp

WIDTH = 16
needs_blocks = pytest.mark.skipif(
    ENGINE.block != WIDTH, reason=f"this processor's blocks hold {ENGINE.block} channels"
)
# Image, weight, attributes.
CONVOLUTIONS = {
    "plain": ((16, 16, 9, 9), (16, 16, 3, 3), {"pads": [1] * 4}),
    "two blocks": ((32, 16, 6, 7), (32, 16, 3, 3), {"pads": [1] * 4}),
    "few channels": ((16, 3, 8, 8), (48, 3, 5, 5), {"pads": [2] * 4}),
    "one channel": ((16, 1, 8, 8), (16, 1, 3, 3), {}),
    "strided": ((16, 5, 9, 10), (16, 5, 3, 3), {"strides": [2, 2], "pads": [1] * 4}),
    "cut off": ((16, 4, 8, 9), (16, 4, 2, 2), {"strides": [3, 4]}),
    "lopsided": ((16, 6, 7, 5), (32, 6, 2, 4), {"pads": [0, 2, 1, 0]}),
    "strides apart": ((16, 6, 7, 8), (16, 6, 3, 2), {"strides": [1, 2]}),
    "tall dilation": ((16, 4, 9, 7), (16, 4, 3, 3), {"dilations": [2, 1]}),
    "same": ((16, 4, 7, 8), (16, 4, 3, 2), {"auto_pad": "SAME_LOWER"}),
    "one row": ((16, 4, 6, 6), (16, 4, 1, 3), {}),
    "one window": ((16, 4, 3, 3), (16, 4, 3, 3), {}),
    "two bands": ((8, 4, 6, 7), (16, 4, 3, 3), {"pads": [1] * 4}),
    "three bands": ((16, 4, 9, 5), (32, 4, 3, 3), {"pads": [1, 1, 0, 0]}),
    "strided bands": ((4, 3, 16, 7), (32, 3, 5, 5), {"strides": [2, 2], "pads": [2] * 4}),
    "bands cut off": ((8, 4, 13, 8), (16, 4, 2, 2), {"strides": [3, 2]}),
    "bands of one row": ((2, 4, 12, 5), (16, 4, 3, 3), {"dilations": [2, 1]}),
    "large": ((16, 1, 8, CACHE_BYTES // 2**14), (64, 1, 3, 3), {"pads": [1] * 4}),
    "depthwise": ((2, 16, 7, 6), (16, 1, 3, 3), {"group": 16, "strides": [2, 1]}),
}  # fmt: skip
PORTABLE = {
    "samples": ((8, 4, 5, 5), (16, 4, 3, 3), {}),
    "features": ((16, 4, 5, 5), (17, 4, 3, 3), {}),
    "groups": ((16, 4, 5, 5), (16, 2, 3, 3), {"group": 2}),
    "points": ((16, 4, 5, 5), (16, 4, 1, 1), {"strides": [2, 2]}),
    "wide dilation": ((16, 4, 5, 5), (16, 4, 2, 2), {"dilations": [1, 2]}),
    "one axis": ((16, 4, 5), (16, 4, 3), {}),
    "too large": ((16, 1, 3, CACHE_BYTES // 2**11), (64, 1, 3, 3), {"pads": [1] * 4}),
}


def gradient(op_type, inputs, attributes, block):
    """Of the weight, and the domains of the nodes that make it."""
    graph = Graph([node(op_type, "x w", "y", **attributes)], dict(inputs))
    graph.g.block = block
    dy = normal(*graph.g.shape("y"), seed=2)
    back = vjp(graph.g, graph.nodes, {"y": graph.seed("y", dy)}, ["w"])
    made = live_nodes(graph.g.nodes, set(back.values()))
    return graph.run(back)["w"], {n.domain for n in made}


@needs_blocks
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_summing_over_blocks_of_samples_gives_the_same(op_type, name):
    """Of a convolution, and of the transposed one that goes the other way."""
    image, weight, attributes = CONVOLUTIONS[name]
    inputs = {"x": normal(*image), "w": normal(*weight, seed=1)}
    if op_type == "ConvTranspose":
        steps = Graph([node("Conv", "x w", "y", **attributes)], inputs).g.shape("y")
        inputs["x"] = normal(*steps)
    expected, standard = gradient(op_type, inputs, attributes, 0)
    found, domains = gradient(op_type, inputs, attributes, WIDTH)
    assert standard == {""}
    assert DOMAIN in domains
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", PORTABLE)
def test_where_blocks_are_not_whole_or_too_large_it_stays_portable(name):
    image, weight, attributes = PORTABLE[name]
    inputs = {"x": normal(*image), "w": normal(*weight, seed=1)}
    _, domains = gradient("Conv", inputs, attributes, WIDTH)
    assert domains == {""}
