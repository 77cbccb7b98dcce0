"""Gathers, scatters, sequences, pads and equations on which their rules are tried."""

from __future__ import annotations

import numpy as np
from rule_case import Case, ints, positive, real, scalar, smooth

EQUATIONS = {
    "...ij,...jk->...ik": ((2, 3, 4), (2, 4, 5)),
    "...ij,jk->...ik": ((2, 3, 4), (4, 5)),
    "...i,...i": ((2, 1, 3), (2, 4, 3)),
    "b...d,d->b...": ((2, 3, 4, 5), (5,)),
    "...ij->ji...": ((3, 2, 4),),
    "i...,j": ((2, 3), (4,)),
    "ij,jk->ik": ((2, 3), (1, 4)),
}


def _gathers() -> list[Case]:
    x = real(3, 4, 5, seed=8)
    along = np.random.default_rng(0).integers(-4, 4, (3, 2, 5))
    tuples = ints(0, 1, 2, -1, 0, 1).reshape(3, 2)
    batched = ints(0, 3, 3, -2, 1, 0).reshape(3, 2, 1)
    chosen = np.array([True, False, True, True])
    values = real(2, seed=3)
    cases = []
    for label, runtime in (("known", False), ("at run time", True)):
        cases += [
            Case("GatherElements", label, (x, along), {"axis": 1}, runtime=runtime),
            Case("GatherND", f"tuples {label}", (x, tuples), runtime=runtime),
            Case("GatherND", f"batch {label}", (x, batched), {"batch_dims": 1},
                 runtime=runtime),
            Case("GatherND", f"elements {label}", (x, ints(2, -1, 4).reshape(1, 3)),
                 runtime=runtime),
            Case("OneHot", label, (ints(0, -1, 7, 2), np.array(4), values), {"axis": 0},
                 runtime=runtime),
        ]  # fmt: skip
    return [
        *cases,
        Case("TopK", "largest", (x, ints(2)), outputs=2),
        Case("TopK", "smallest", (x, ints(3)), {"axis": 1, "largest": 0}, outputs=2),
        Case("Compress", "axis", (x, chosen), {"axis": 1}, fixed=(1,)),
        Case("Compress", "flat", (x, np.tile(chosen, 6)), fixed=(1,)),
        Case("Compress", "short", (x, chosen[:2]), {"axis": -1}, fixed=(1,)),
    ]


def _scatters() -> list[Case]:
    x = positive(4, 3, seed=1)
    rows = ints(1, 3, 1, 0, -1, 1).reshape(2, 3)
    distinct = ints(1, 3, 0, 0, -2, 1).reshape(2, 3)
    parts, pair = positive(2, 3, seed=2) + np.float32(0.013), ints(2, 0).reshape(2, 1)
    twice, spots = ints(2, 0, 2).reshape(3, 1), ints(1, 0, 3, 2, 1, 0).reshape(3, 2)
    threes, singles = positive(3, 3, seed=4) + np.float32(0.017), positive(3, seed=5)
    zeros = parts.copy()
    zeros[0, 0] = zeros[1, 1] = 0
    cases = [
        Case("ScatterElements", "plain", (x, distinct, parts)),
        Case("ScatterElements", "columns", (x, ints(1, 0).reshape(2, 1), parts[:, :1]),
             {"axis": 1}, runtime=True),
        Case("ScatterElements", "zeros", (x, rows, zeros), {"reduction": "mul"}),
        Case("ScatterND", "plain", (x, pair, parts)),
        Case("ScatterND", "plain at run time", (x, pair, parts), runtime=True),
        Case("ScatterND", "elements", (x, spots[:2], singles[:2])),
    ]  # fmt: skip
    for how in ("add", "mul", "max", "min"):
        more = {"reduction": how}
        cases += [
            Case("ScatterElements", how, (x, rows, parts), more),
            Case("ScatterND", f"rows {how}", (x, twice, threes), more, runtime=True),
            Case("ScatterND", f"elements {how}", (x, spots, singles), more),
        ]
    unpool = {"kernel_shape": [2, 2], "strides": [2, 2]}
    places = ints(5, 2, 8, 15).reshape(1, 1, 2, 2)
    return [*cases, Case("MaxUnpool", "two", (real(1, 1, 2, 2), places), unpool)]


def _samples() -> list[Case]:
    """Places well away from the elements, where the slope is not unique."""
    rng = np.random.default_rng(7)
    image, volume = smooth(2, 3, 5, 6), smooth(1, 2, 3, 4, 2)
    cases = []
    for padding in ("zeros", "border", "reflection"):
        for aligned in (0, 1):
            for mode in ("linear", "nearest"):
                more = {"padding_mode": padding, "align_corners": aligned, "mode": mode}
                label = f"{padding} {aligned} {mode}"
                cases += [
                    Case(
                        "GridSample",
                        label,
                        (image, _places(rng, (2, 4, 3), (6, 5), aligned)),
                        more,
                    ),
                    Case(
                        "GridSample",
                        f"{label} volume",
                        (volume, _places(rng, (1, 2, 3, 2), (2, 4, 3), aligned)),
                        more,
                    ),
                ]
    return cases


def _places(
    rng, shape: tuple[int, ...], sizes: tuple[int, ...], aligned: int
) -> np.ndarray:
    """Coordinates of places a fifth or more from every element and every midpoint."""
    columns = []
    for size in sizes:
        cell = rng.integers(-2, size + 1, shape)
        place = cell + rng.choice([0.2, 0.3, 0.7, 0.8], shape)
        span = size - 1 if aligned else size
        columns.append((2 * place - (size - 1)) / span)
    return np.stack(columns, -1).astype(np.float32)


def _sequences() -> list[Case]:
    x = real(3, 4, seed=8)
    lengths = ints(2, 4, 1)
    time_second = {"batch_axis": 0, "time_axis": 1}
    cases = [
        Case("CumSum", f"{exclusive}{reverse}", (x, np.array(1)),
             {"exclusive": exclusive, "reverse": reverse})
        for exclusive in (0, 1)
        for reverse in (0, 1)
    ]  # fmt: skip
    return [
        *cases,
        Case("CumSum", "first axis", (x, np.array(-2))),
        Case("Trilu", "upper", (x,)),
        Case("Trilu", "lower", (real(2, 3, 3), np.array(-1)), {"upper": 0}),
        Case("ReverseSequence", "rows", (x, lengths), time_second),
        Case("ReverseSequence", "columns", (real(4, 3), lengths)),
        Case("Range", "up", (scalar(0.5), scalar(3.1), scalar(0.7)), fixed=(1,)),
    ]


def _pads() -> list[Case]:
    x = real(3, 4, 5, seed=8)
    cases = []
    for mode in ("edge", "reflect", "wrap"):
        more = {"mode": mode}
        cases += [
            Case("Pad", f"{mode} around", (x, ints(1, 2, 3, 2, 1, 0)), more),
            Case("Pad", f"{mode} far", (x, ints(0, 3, 4, 2, 3, 4)), more),
            Case("Pad", f"{mode} axes", (x, ints(2, 1), None, ints(-2)), more),
            Case("Pad", f"{mode} none", (x, ints(0, 0, 0, 0, 0, 0)), more),
        ]
    return cases


def _einsums() -> list[Case]:
    return [
        Case("Einsum", e, tuple(smooth(*s, seed=i) for i, s in enumerate(shapes)),
             {"equation": e})
        for e, shapes in EQUATIONS.items()
    ]  # fmt: skip


SELECTION_CASES = [
    *_gathers(),
    *_scatters(),
    *_samples(),
    *_sequences(),
    *_pads(),
    *_einsums(),
]
