"""Convolutions, pools and resizes on which their rules are tried."""

from __future__ import annotations

from typing import Any

import numpy as np
from rule_case import Case, ints, real, smooth

Shape = tuple[int, ...]
Convolution = tuple[Shape, Shape, dict[str, Any]]  # x, w, attributes

CONVOLUTIONS: dict[str, Convolution] = {
    "valid": ((2, 3, 5, 6), (4, 3, 3, 3), {}),
    "same": ((2, 3, 5, 6), (4, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    "many channels": ((2, 9, 5, 5), (4, 9, 3, 2), {"pads": [1, 0, 1, 1]}),
    "strides": ((2, 9, 7, 8), (4, 9, 3, 3), {"strides": [2, 3]}),
    "few strides": ((2, 2, 7, 8), (4, 2, 3, 3), {"strides": [2, 2], "pads": [1] * 4}),
    "dilations": ((1, 9, 7, 8), (3, 9, 3, 2), {"dilations": [2, 3]}),
    "asymmetric": (
        (2, 3, 8, 8), (4, 3, 3, 3), {"strides": [2, 2], "pads": [0, 0, 1, 1]}
    ),
    "same upper": ((1, 3, 6, 7), (4, 3, 3, 4), {"auto_pad": "SAME_UPPER"}),
    "same lower": (
        (1, 3, 6, 7), (4, 3, 3, 4), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}
    ),
    "auto valid": ((1, 3, 6, 7), (4, 3, 3, 4), {"auto_pad": "VALID"}),
    "point": ((2, 3, 4, 5), (6, 3, 1, 1), {}),
    "point strided": ((2, 9, 5, 5), (6, 9, 1, 1), {"strides": [2, 2]}),
    "point padded": ((2, 3, 4, 4), (5, 3, 1, 1), {"pads": [1, 1, 1, 1]}),
    "point groups": ((2, 6, 4, 5), (4, 3, 1, 1), {"group": 2}),
    "groups": ((2, 6, 6, 5), (4, 3, 3, 3), {"group": 2, "strides": [2, 1]}),
    "depthwise": ((2, 4, 5, 5), (4, 1, 3, 3), {"group": 4, "pads": [1] * 4}),
    "depthwise wide": ((2, 3, 4, 17), (3, 1, 3, 3), {"group": 3, "pads": [1] * 4}),
    "depthwise strided": ((2, 4, 7, 8), (4, 1, 3, 3), {"group": 4, "strides": [2, 2]}),
    "depthwise five": ((1, 3, 4, 16), (3, 1, 5, 5), {"group": 3, "pads": [2] * 4}),
    "multiplier": ((2, 3, 5, 5), (6, 1, 3, 3), {"group": 3}),
    "one axis": ((2, 3, 9), (4, 3, 3), {"strides": [2], "pads": [1, 0]}),
    "depthwise one axis": ((2, 3, 20), (3, 1, 3), {"group": 3, "pads": [1, 1]}),
    "three axes": ((1, 2, 4, 4, 3), (3, 2, 2, 2, 2), {}),
    "thin": ((2, 64, 3, 4), (65, 64, 2, 3), {"pads": [1, 0, 0, 2]}),
    "thin dilated": ((2, 65, 5, 5), (64, 65, 2, 2), {"dilations": [1, 2], "pads": [1] * 4}),
    "thin one axis": ((3, 64, 7), (64, 64, 3), {"pads": [1, 1]}),
    "padded beyond": ((2, 64, 3, 3), (64, 64, 2, 2), {"pads": [2, 0, 0, 0]}),
}  # fmt: skip

TRANSPOSED: dict[str, Convolution] = {
    "plain": ((2, 9, 4, 5), (9, 2, 3, 3), {}),
    "strides": ((2, 3, 4, 5), (3, 2, 4, 4), {"strides": [2, 2], "pads": [1] * 4}),
    "groups": ((2, 4, 4, 5), (4, 3, 3, 3), {"group": 2, "strides": [2, 2]}),
    "dilated": (
        (1, 3, 4, 5), (3, 2, 3, 3), {"dilations": [2, 2], "pads": [1, 0, 2, 1]}
    ),
    "extended": (
        (1, 3, 4, 4), (3, 2, 3, 3),
        {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 1]},
    ),
    "one axis": ((2, 3, 5), (3, 2, 2), {"strides": [2]}),
    "output shape": (
        (1, 3, 4, 5), (3, 2, 3, 4), {"strides": [2, 2], "output_shape": [8, 9]}
    ),
    "larger output": (
        (1, 3, 4, 4), (3, 2, 3, 3),
        {"output_shape": [8, 7], "strides": [2, 2], "output_padding": [1, 0]},
    ),
    "same upper": (
        (1, 3, 4, 5), (3, 2, 4, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}
    ),
    "same lower": (
        (1, 3, 4, 5), (3, 2, 4, 3), {"strides": [2, 1], "auto_pad": "SAME_LOWER"}
    ),
    "auto valid": ((1, 3, 4, 5), (3, 2, 4, 3), {"auto_pad": "VALID"}),
    "point": ((2, 3, 4, 4), (3, 5, 1, 1), {}),
}  # fmt: skip

POOLS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "tiles": ((2, 2, 4, 6), {"kernel_shape": [2, 3], "strides": [2, 3]}),
    "ragged": ((2, 2, 5, 5), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "overlap": (
        (1, 2, 7, 7),
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    ),
    "unit strides": ((1, 2, 5, 6), {"kernel_shape": [3, 2]}),
    "ceil": (
        (1, 2, 6, 6), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}
    ),
    "ceil padded": (
        (1, 2, 7, 6),
        {"kernel_shape": [3, 3], "strides": [3, 2], "ceil_mode": 1, "pads": [1] * 4},
    ),
    "same upper": ((1, 2, 5, 6), {"kernel_shape": [2, 3], "auto_pad": "SAME_UPPER"}),
    "dilated": ((1, 2, 6, 7), {"kernel_shape": [2, 2], "dilations": [2, 3]}),
    "one axis": ((2, 3, 8), {"kernel_shape": [2], "strides": [2]}),
}  # fmt: skip


def _convolution() -> list[Case]:
    cases = [
        Case("Conv", label, (smooth(*x, seed=1), smooth(*w, seed=2), smooth(w[0])), more)
        for label, (x, w, more) in CONVOLUTIONS.items()
    ]
    for label, (x, w, more) in TRANSPOSED.items():
        bias = smooth(w[1] * more.get("group", 1))
        inputs = (smooth(*x, seed=1), smooth(*w, seed=2), bias)
        cases.append(Case("ConvTranspose", label, inputs, more))
    plain = (smooth(1, 2, 4, 4), smooth(3, 2, 2, 2, seed=1))
    return [*cases, Case("Conv", "no bias", plain)]


def _pooling() -> list[Case]:
    cases = []
    for label, (shape, more) in POOLS.items():
        x = real(*shape, seed=6)
        cases.append(Case("MaxPool", label, (x,), more))
        cases.append(Case("AveragePool", label, (x,), more))
        if more.get("pads"):
            counted = {**more, "count_include_pad": 1}
            cases.append(Case("AveragePool", f"{label} counted", (x,), counted))
    return [
        *cases,
        Case("GlobalAveragePool", "image", (real(2, 3, 4, 4),)),
        Case("GlobalMaxPool", "image", (real(2, 3, 4, 4),)),
        Case("GlobalMaxPool", "sequence", (real(2, 3, 5),)),
    ]


def _resize() -> list[Case]:
    x = real(1, 2, 3, 4, seed=10)
    floor = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    up = np.array([1, 1, 2, 3], np.float32)
    odd = np.array([1, 1, 1.5, 0.5], np.float32)
    corners = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    return [
        Case("Resize", "repeat", (x, None, up), floor, fixed=(2,)),
        Case("Resize", "half pixel", (x, None, up), fixed=(2,)),
        Case("Resize", "uneven", (x, None, odd), floor, fixed=(2,)),
        Case("Resize", "sizes", (x, None, None, ints(1, 2, 6, 5)), {"mode": "linear"}),
        Case("Resize", "linear", (x, None, up), {"mode": "linear"}, fixed=(2,)),
        Case("Resize", "corners", (x, None, up), corners, fixed=(2,)),
        Case("Resize", "cubic", (x, None, up), {"mode": "cubic"}, fixed=(2,)),
        Case("Resize", "axes", (x, None, np.array([2], np.float32)),
             {"mode": "linear", "axes": [3]}, fixed=(2,)),
        Case("Resize", "channels", (x, None, np.array([1, 2, 1, 1], np.float32)), floor,
             fixed=(2,)),
    ]  # fmt: skip


SPATIAL_CASES = [*_convolution(), *_pooling(), *_resize()]
