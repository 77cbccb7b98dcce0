"""Operators that move elements without choosing among them."""

from __future__ import annotations

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents
from edgetrain.compiler.rules.shaping import reshape, sum_axes, sum_to, zeros


def reshape_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Serves Reshape, Flatten, Squeeze and Unsqueeze."""
    return (reshape(g, dy, g.shape(node.inputs[0])),)


def reshape_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    return tangents[0] and reshape(g, tangents[0], g.shape(node.output))


def transpose_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    perm = node.get("perm", [*reversed(range(g.rank(node.inputs[0])))])
    return (g("Transpose", dy, perm=np.argsort(perm).tolist()),)


def expand_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    return (sum_to(g, dy, g.shape(node.output), g.shape(node.inputs[0])),)


def expand_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    return tangents[0] and g("Expand", tangents[0], g.ints(*g.shape(node.output)))


def tile_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Give every repeated axis an axis of its own for the repeats, and sum over these."""
    split: list[int] = []
    repeats = []
    shape = g.shape(node.inputs[0])
    for extent, total in zip(shape, g.shape(node.output), strict=True):
        if extent != total:
            repeats.append(len(split))
            split.append(total // extent)
        split.append(extent)
    if not repeats:
        return (dy,)
    return (sum_axes(g, reshape(g, dy, split), repeats),)


def concat_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    axis = int(node.attributes["axis"])
    sizes = [g.shape(x)[axis] for x in node.inputs]
    if len(sizes) == 1:
        return (dy,)
    return g.multi("Split", dy, g.ints(*sizes), outputs=len(sizes), axis=axis)


def concat_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    parts = _filled(g, node.inputs, tangents)
    return g("Concat", *parts, axis=node.attributes["axis"])


def split_vjp(g: GraphBuilder, node: Node, dys: Cotangents) -> Cotangents:
    parts = _filled(g, node.outputs, dys)
    return (g("Concat", *parts, axis=node.get("axis", 0)),)


def split_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> Tangents:
    axis = int(node.get("axis", 0))
    if tangents[0] is None:
        return tuple(None for _ in node.outputs)
    sizes = g.ints(*(g.shape(y)[axis] for y in node.outputs))
    return g.multi("Split", tangents[0], sizes, outputs=len(node.outputs), axis=axis)


def _filled(g: GraphBuilder, primals: tuple[str, ...], values: Tangents) -> list[str]:
    return [
        value or zeros(g, g.shape(primal), primal)
        for primal, value in zip(primals, values, strict=True)
    ]


def depth_to_space_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    block = int(node.attributes["blocksize"])
    if node.get("mode", "DCR") == "DCR":
        return (g("SpaceToDepth", dy, blocksize=block),)
    n, channels, height, width = g.shape(node.inputs[0])
    depth = channels // block**2
    blocks = reshape(g, dy, (n, depth, height, block, width, block))
    moved = g("Transpose", blocks, perm=[0, 1, 3, 5, 2, 4])
    return (reshape(g, moved, (n, channels, height, width)),)


def space_to_depth_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    return (g("DepthToSpace", dy, blocksize=int(node.attributes["blocksize"])),)
