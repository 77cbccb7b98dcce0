"""Functions of one variable, and masks of one, on which their rules are tried."""

from __future__ import annotations

import numpy as np
from rule_case import Case, positive, real, scalar, smooth


def _trigonometry() -> list[Case]:
    inside = real(3, 7, seed=4) * np.float32(0.45)
    cases = [
        Case(op, "inside", (inside,))
        for op in ("Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Atanh")
    ]
    wide = real(3, 7, seed=5) * np.float32(3)
    cases += [Case(op, "wide", (wide,)) for op in ("Atan", "Asinh")]
    return [*cases, Case("Acosh", "above one", (positive(3, 7) + np.float32(0.8),))]


def _units() -> list[Case]:
    x = real(3, 7, seed=4)
    cases = [
        Case(op, "signed", (x,))
        for op in ("Selu", "Celu", "ThresholdedRelu", "Shrink", "Softsign", "Mish")
    ]
    return [
        *cases,
        Case("Selu", "other", (x,), {"alpha": 0.4, "gamma": 2.5}),
        Case("Celu", "sharp", (x,), {"alpha": 0.3}),
        Case("Celu", "negative", (x,), {"alpha": -0.7}),
        Case("ThresholdedRelu", "negative", (x,), {"alpha": -0.51}),
        Case("Shrink", "soft", (x,), {"lambd": 0.93, "bias": 0.93}),
        Case("Mish", "wide", (x * np.float32(5),)),
    ]


def _dropout() -> list[Case]:
    x, half = smooth(4, 9), scalar(0.5)
    ratio, on, off = scalar(0.3), np.array(True), np.array(False)
    return [
        Case("Dropout", "inference", (x,)),
        Case("Dropout", "switched off", (x, half, off), outputs=2, fixed=(1, 2)),
        Case("Dropout", "training", (x, ratio, on), {"seed": 1}, 2,
             fixed=(1, 2), random=True),
        Case("Dropout", "default ratio", (x, None, on), {"seed": 1}, 2, fixed=(2,),
             random=True),
    ]  # fmt: skip


def _others() -> list[Case]:
    a, b = real(3, 4, seed=1), positive(3, 1, seed=2)
    levels = np.arange(-6, 6, dtype=np.int8).reshape(3, 4)
    zero = np.array([1, -2, 0, 3], np.int8)
    images = levels.reshape(1, 3, 2, 2)
    return [
        Case("Mod", "truncated", (a * np.float32(3.1), b), {"fmod": 1}),
        Case("Mod", "negative", (a * np.float32(3.1), -b), {"fmod": 1}),
        Case("Clip", "crossed", (a, scalar(2), scalar(1))),
        Case("DequantizeLinear", "one scale", (levels, scalar(0.3)), fixed=(0,)),
        Case("DequantizeLinear", "by column", (levels, positive(4), zero), fixed=(0, 2)),
        Case("DequantizeLinear", "by row", (levels, positive(3), zero[:3]), {"axis": 0},
             fixed=(0, 2)),
        Case("DequantizeLinear", "by channel", (images, positive(3)), {"axis": -3},
             fixed=(0,)),
    ]  # fmt: skip


ACTIVATION_CASES = [*_trigonometry(), *_units(), *_dropout(), *_others()]
