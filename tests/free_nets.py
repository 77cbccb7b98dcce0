"""Untrained networks for tests of backprop-free training, by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper
from small_models import build


def he(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal with variance 2 / fan-in (He et al. 2015); the first axis is the outputs."""
    return rng.normal(0, math.sqrt(2 / math.prod(shape[1:])), shape).astype(np.float32)


def mlp(widths: Sequence[int], seed: int = 0) -> onnx.ModelProto:
    """From ``x`` [N, widths[0]] to ``logits``, with ReLU between the layers.

    The values between are ``fc1``, ``relu1``, ``fc2`` and so on: all valid cuts.
    """
    rng = np.random.default_rng(seed)
    last = len(widths) - 1
    nodes, tensors, source = [], {}, "x"
    for layer in range(1, last + 1):
        weight, bias = f"fc{layer}.weight", f"fc{layer}.bias"
        tensors[weight] = he(rng, widths[layer], widths[layer - 1])
        tensors[bias] = np.zeros(widths[layer], np.float32)
        made = "logits" if layer == last else f"fc{layer}"
        nodes.append(helper.make_node("Gemm", [source, weight, bias], [made], transB=1))
        if layer < last:
            source = f"relu{layer}"
            nodes.append(helper.make_node("Relu", [made], [source]))
    return build(nodes, [("x", ["N", widths[0]])], ["logits"], tensors)
