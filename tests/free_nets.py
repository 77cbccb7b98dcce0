"""Untrained networks for tests of backprop-free training, from ``x`` to ``logits``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from free_graph import Graph


def mlp(widths: Sequence[int], seed: int = 0, noise: float = 0.0) -> onnx.ModelProto:
    """[N, widths[0]] to [N, widths[-1]], with ReLU between the layers.

    The values between are ``fc1``, ``relu1``, ``fc2`` and so on.
    """
    g, x, last = Graph(widths[:1], seed, noise), "x", len(widths) - 1
    for number, pair in enumerate(itertools.pairwise(widths), 1):
        x = g.gemm(x, f"fc{number}", pair, "logits" if number == last else "")
        if number < last:
            x = g.node("Relu", [x], f"relu{number}")
    return g.model()


def cnn(
    shape: tuple[int, int, int],
    channels: Sequence[int],
    classes: int,
    *,
    seed: int = 0,
    noise: float = 0.0,
) -> onnx.ModelProto:
    """[N, *shape] to [N, classes]: convolutions, max pooling, one dense layer.

    The values between are ``conv1``, ``relu1`` and so on, ``pool`` and ``flat``.
    """
    g, x = Graph(shape, seed, noise), "x"
    for number, pair in enumerate(itertools.pairwise((shape[0], *channels)), 1):
        x = g.conv(x, f"conv{number}", (*pair[::-1], 3, 3), bias=True)
        x = g.node("Relu", [x], f"relu{number}")
    x = g.node("MaxPool", [x], "pool", kernel_shape=[2, 2], strides=[2, 2])
    flat = channels[-1] * (shape[1] // 2) * (shape[2] // 2)
    g.gemm(g.node("Flatten", [x], "flat"), "head", (flat, classes), "logits")
    return g.model()


@dataclass(frozen=True)
class MobileNet:
    """MobileNetV2 in one dimension or two, [N, *shape] to [N, classes].

    The values that cross between its parts are ``stem_relu``, ``block1``, ``block2`` and so
    on, ``mix_relu`` and ``flat``.

    Attributes:
        shape: of a sample: channels, then one extent or two.
        widths: channels of the stem and of each block; where they grow, extents halve.
        mix: channels before the head.
    """

    shape: tuple[int, ...]
    widths: tuple[int, ...]
    mix: int
    classes: int

    def model(self, seed: int = 0, noise: float = 0.0) -> onnx.ModelProto:
        g, ones = Graph(self.shape, seed, noise), [1] * (len(self.shape) - 1)
        threes, twos = [3] * len(ones), [2] * len(ones)
        x = g.conv("x", "stem", (self.widths[0], self.shape[0], *threes), strides=twos)
        x = g.relu6(g.batch_norm(x, "stem_norm", self.widths[0]), "stem_relu")
        for number, pair in enumerate(itertools.pairwise(self.widths), 1):
            x = inverted_residual(g, x, f"block{number}", pair, len(ones))
        x = g.conv(x, "mix", (self.mix, self.widths[-1], *ones))
        x = g.relu6(g.batch_norm(x, "mix_norm", self.mix), "mix_relu")
        x = g.node("Flatten", [g.node("GlobalAveragePool", [x], "pool")], "flat")
        g.gemm(x, "head", (self.mix, self.classes), "logits")
        return g.model()


def inverted_residual(
    g: Graph, x: str, name: str, widths: tuple[int, int], rank: int
) -> str:
    """Expand fourfold, filter each channel, project; a shortcut where the shape stays."""
    (inputs, outputs), ones = widths, [1] * rank
    wide, adds = 4 * inputs, inputs == outputs
    y = g.conv(x, f"{name}.expand", (wide, inputs, *ones))
    y = g.relu6(g.batch_norm(y, f"{name}.expand_norm", wide), f"{name}.expand_relu")
    strides = ones if adds else [2] * rank
    y = g.conv(y, f"{name}.filter", (wide, 1, *[3] * rank), strides=strides, group=wide)
    y = g.relu6(g.batch_norm(y, f"{name}.filter_norm", wide), f"{name}.filter_relu")
    y = g.conv(y, f"{name}.project", (outputs, wide, *ones))
    y = g.batch_norm(y, f"{name}.project_norm", outputs, "" if adds else name)
    return g.node("Add", [x, y], name) if adds else y


@dataclass(frozen=True)
class Encoder:
    """Pre-norm transformer blocks on tokens [N, tokens, features], to [N, classes].

    The values that cross between its parts are ``embed``, ``block1``, ``block2`` and so on,
    and ``mean``.
    """

    tokens: int
    features: int
    width: int
    heads: int
    blocks: int
    classes: int

    def model(self, seed: int = 0, noise: float = 0.0) -> onnx.ModelProto:
        g = Graph((self.tokens, self.features), seed, noise)
        x = g.dense("x", "embed", (self.features, self.width))
        for number in range(1, self.blocks + 1):
            x = self._block(g, x, f"block{number}")
        x = g.layer_norm(x, "norm", self.width)
        axes = g.constant("axes", np.asarray([1]))
        x = g.node("ReduceMean", [x, axes], "mean", keepdims=0)
        g.gemm(x, "head", (self.width, self.classes), "logits")
        return g.model()

    def _block(self, g: Graph, x: str, name: str) -> str:
        width, wide = self.width, 2 * self.width
        y = self._attention(g, g.layer_norm(x, f"{name}.norm1", width), f"{name}.self_attn")
        x = g.node("Add", [x, y], f"{name}.attended")
        y = g.dense(
            g.layer_norm(x, f"{name}.norm2", width), f"{name}.linear1", (width, wide)
        )
        y = g.dense(g.node("Gelu", [y], f"{name}.gelu"), f"{name}.linear2", (wide, width))
        return g.node("Add", [x, y], name)

    def _attention(self, g: Graph, x: str, name: str) -> str:
        size = self.width // self.heads
        packed = g.dense(x, f"{name}.in_proj", (self.width, 3 * self.width))
        split = g.reshape(packed, f"{name}.split", 0, self.tokens, 3, self.heads, size)
        axes = {"query": [0, 2, 1, 3], "key": [0, 2, 3, 1], "value": [0, 2, 1, 3]}
        parts = []
        for index, (word, perm) in enumerate(axes.items()):
            place = g.constant(f"{word}.index", np.asarray(index))
            part = g.node("Gather", [split, place], f"{name}.{word}", axis=2)
            parts.append(g.node("Transpose", [part], f"{part}s", perm=perm))
        query, key, value = parts
        root = g.constant("root", np.float32(math.sqrt(size)))
        scores = g.node(
            "Div",
            [g.node("MatMul", [query, key], f"{name}.products"), root],
            f"{name}.scores",
        )
        shares = g.node("Softmax", [scores], f"{name}.shares", axis=-1)
        mixed = g.node("MatMul", [shares, value], f"{name}.mixed")
        mixed = g.node("Transpose", [mixed], f"{name}.tokens", perm=[0, 2, 1, 3])
        joined = g.reshape(mixed, f"{name}.joined", 0, self.tokens, self.width)
        return g.dense(joined, f"{name}.out_proj", (self.width, self.width))
