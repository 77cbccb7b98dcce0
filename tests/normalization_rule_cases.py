"""Norms, products over axes, crops and losses on which their rules are tried."""

from __future__ import annotations

import numpy as np
from rule_case import Case, ints, positive, real, smooth
from spatial_rule_cases import POOLS


def _standardizations() -> list[Case]:
    x = smooth(2, 6, 3, 2, seed=1)
    two = (x, positive(2, seed=2), smooth(2, seed=3))
    return [
        Case("GroupNormalization", "image", two, {"num_groups": 2}),
        Case("GroupNormalization", "one group", (x, positive(1), smooth(1)),
             {"num_groups": 1, "epsilon": 1e-2}),
        Case("GroupNormalization", "vector", (smooth(5, 6), *two[1:]), {"num_groups": 2}),
        Case("MeanVarianceNormalization", "image", (x,)),
        Case("MeanVarianceNormalization", "axes", (x,), {"axes": [1, 2]}),
        Case("LRN", "odd", (x,), {"size": 3, "alpha": 0.7, "beta": 0.6, "bias": 1.5}),
        Case("LRN", "wide", (smooth(2, 3, 4, 1),), {"size": 7, "alpha": 2.0}),
    ]  # fmt: skip


def _norms() -> list[Case]:
    x = real(2, 3, 4, seed=7)
    cases = [
        Case("LpNormalization", f"{p} {axis}", (x,), {"p": p, "axis": axis})
        for p in (1, 2)
        for axis in (0, -1)
    ]
    for p in (1, 2, 3):
        cases += [
            Case("LpPool", f"{p} {label}", (real(*shape, seed=6),), {**more, "p": p})
            for label, (shape, more) in POOLS.items()
        ]
        cases.append(Case("GlobalLpPool", str(p), (real(2, 3, 4, 2),), {"p": p}))
    for op, value in (("ReduceProd", x), ("ReduceLogSum", positive(2, 3, 4))):
        cases += [
            Case(op, "all", (value,)),
            Case(op, "one", (value, ints(1))),
            Case(op, "two", (value, ints(-1, 0)), {"keepdims": 0}),
        ]
    zeros = x.copy()
    zeros[0, 0, 0] = zeros[1, :2, 1] = 0
    return [*cases, Case("ReduceProd", "zeros", (zeros, ints(1)))]


def _crops() -> list[Case]:
    x = real(1, 2, 5, 6, seed=10)
    part = np.array([0, 0, 0.2, -0.3, 1, 1, 0.8, 1.2], np.float32)
    sizes = ints(1, 2, 4, 7)
    crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "mode": "linear"}
    filled = {**crop, "mode": "nearest", "extrapolation_value": 3.0}
    cases = [
        Case("Resize", mode.replace("_", " "), (x, None, None, sizes),
             {"mode": "linear", "coordinate_transformation_mode": mode})
        for mode in ("pytorch_half_pixel", "half_pixel_symmetric", "asymmetric",
                     "align_corners")
    ]  # fmt: skip
    down = np.array([1, 1, 0.6, 0.7], np.float32)
    smoothed = {"mode": "linear", "antialias": 1}
    kept = {"keep_aspect_ratio_policy": "not_larger", "axes": [2, 3]}
    return [
        *cases,
        Case("Resize", "antialias", (x, None, down), smoothed, fixed=(2,)),
        Case("Resize", "crop", (x, part, None, sizes), crop, fixed=(1,)),
        Case("Resize", "crop filled", (x, part, None, sizes), filled, fixed=(1,)),
        Case("Resize", "aspect", (x, None, None, ints(10, 13)), kept),
    ]


def _columns() -> list[Case]:
    two = {"strides": [2, 1], "pads": [1, 0, 1, 0], "dilations": [1, 2]}
    sizes = (ints(5, 5), ints(3, 2))
    return [
        Case("Col2Im", "plain", (smooth(1, 12, 9), ints(4, 5), ints(2, 3))),
        Case("Col2Im", "strided", (smooth(2, 12, 9), *sizes), two),
    ]


def _losses() -> list[Case]:
    cases = []
    for reduction in ("mean", "sum", "none"):
        more = {"reduction": reduction}
        cases += _losses_on((4, 3), more, f"{reduction} vector")
        cases += _losses_on((2, 3, 2, 2), more, f"{reduction} image")
    return cases


def _losses_on(shape: tuple[int, ...], more: dict[str, str], label: str) -> list[Case]:
    scores, weights = smooth(*shape, seed=1), positive(3, seed=2)
    drawn = np.random.default_rng(3).integers(0, 3, (shape[0], *shape[2:]))
    ignored = drawn.copy()
    ignored.flat[1] = -100
    softmax, log = "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"
    skip, skip_class = {**more, "ignore_index": -100}, {**more, "ignore_index": 1}
    cases = []
    for op in (softmax, log):
        cases += [
            Case(op, f"{label} plain", (scores, drawn), more),
            Case(op, f"{label} weighted", (scores, drawn, weights), more),
            Case(op, f"{label} ignoring", (scores, ignored, weights), skip),
            Case(op, f"{label} ignoring a class", (scores, drawn, weights), skip_class,
                 runtime=True),
        ]  # fmt: skip
    return [*cases, Case(softmax, f"{label} two", (scores, drawn), more, 2)]


NORMALIZATION_CASES = [
    *_standardizations(), *_norms(), *_crops(), *_columns(), *_losses(),
]  # fmt: skip
