"""A small builder of ONNX networks, for tests of backprop-free training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper
from small_models import build


class Graph:
    """Collects nodes and weights; a method adds some nodes and returns what they make.

    Args:
        shape: of a sample.
        seed: of the weights, which are normal with variance 2 / fan-in (He et al. 2015).
        noise: how far biases and normalization are from changing nothing.
    """

    def __init__(self, shape: Sequence[int], seed: int, noise: float = 0.0) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: dict[str, np.ndarray] = {}
        self._shape = shape
        self._noise = noise
        self._rng = np.random.default_rng(seed)

    def model(self) -> onnx.ModelProto:
        """From ``x`` to ``logits``, the batch open."""
        inputs = [("x", ["N", *self._shape])]
        return build(self._nodes, inputs, ["logits"], self._tensors)

    def node(self, kind: str, inputs: Sequence[str], made: str, **attributes) -> str:
        self._nodes.append(helper.make_node(kind, inputs, [made], **attributes))
        return made

    def constant(self, name: str, value: np.ndarray) -> str:
        self._tensors[name] = value
        return name

    def weight(self, name: str, *shape: int, fan_in: int) -> str:
        value = self._rng.normal(0, math.sqrt(2 / fan_in), shape)
        return self.constant(f"{name}.weight", value.astype(np.float32))

    def near(self, name: str, middle: float, size: int) -> str:
        value = np.full(size, middle)
        if self._noise:
            value += self._noise * self._rng.uniform(-1, 1, size)
        return self.constant(name, value.astype(np.float32))

    def bias(self, name: str, size: int) -> str:
        return self.near(f"{name}.bias", 0.0, size)

    def gemm(self, x: str, name: str, widths: tuple[int, int], made: str = "") -> str:
        inputs, outputs = widths
        weight = self.weight(name, outputs, inputs, fan_in=inputs)
        return self.node(
            "Gemm", [x, weight, self.bias(name, outputs)], made or name, transB=1
        )

    def dense(self, x: str, name: str, widths: tuple[int, int]) -> str:
        """A product and a sum on the last axis, as of tokens."""
        weight = self.weight(name, *widths, fan_in=widths[0])
        product = self.node("MatMul", [x, weight], f"{name}.product")
        return self.node("Add", [product, self.bias(name, widths[1])], name)

    def conv(
        self, x: str, name: str, shape: Sequence[int], *, bias: bool = False, **attributes
    ) -> str:
        """A convolution, padded so that a stride of 1 keeps odd extents."""
        inputs = [x, self.weight(name, *shape, fan_in=math.prod(shape[1:]))]
        if bias:
            inputs.append(self.bias(name, shape[0]))
        pads = [extent // 2 for extent in shape[2:]] * 2
        return self.node("Conv", inputs, name, pads=pads, **attributes)

    def batch_norm(self, x: str, name: str, channels: int, made: str = "") -> str:
        middles = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
        inputs = [self.near(f"{name}.{key}", m, channels) for key, m in middles.items()]
        return self.node("BatchNormalization", [x, *inputs], made or name)

    def layer_norm(self, x: str, name: str, width: int) -> str:
        inputs = [self.near(f"{name}.weight", 1.0, width), self.bias(name, width)]
        return self.node("LayerNormalization", [x, *inputs], name)

    def relu6(self, x: str, made: str) -> str:
        limits = {"zero": np.float32(0), "six": np.float32(6)}
        inputs = [self.constant(name, np.asarray(v)) for name, v in limits.items()]
        return self.node("Clip", [x, *inputs], made)

    def reshape(self, x: str, made: str, *shape: int) -> str:
        """To a shape in which 0 keeps an extent."""
        return self.node(
            "Reshape", [x, self.constant(f"{made}.shape", np.asarray(shape))], made
        )
