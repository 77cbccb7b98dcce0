"""Sums of a product over the places at which a perturbation is felt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgetrain.segment import Unit

Array = npt.NDArray[Any]
Sums = npt.NDArray[np.floating[Any]]


def felt(unit: Unit, product: Array) -> Sums:
    """For each place of a unit, the sum of `product` over its cone.

    A change at one place moves the stage's end only within a cone; what the noise of other
    places does outside of it has nothing to say about this one and would only add noise.

    Args:
        unit: with a cone.
        product: [N, ...], cotangent times tangent at the stage's end.

    Returns:
        [N, ...] that broadcasts to the unit's shape.
    """
    everywhere = tuple(a for a, spans in enumerate(unit.cone, start=1) if not spans)
    total: Sums = product
    if everywhere:
        total = product.sum(axis=everywhere, dtype=np.float64, keepdims=True)
    for axis, spans in enumerate(unit.cone, start=1):
        if spans:
            total = _summed(total, axis, spans)
    return total.astype(np.float32)


def _summed(values: Sums, axis: int, spans: Sequence[tuple[int, int]]) -> Sums:
    same = values.shape[axis] == len(spans)
    if same and all(span == (place, place) for place, span in enumerate(spans)):
        return values
    start = np.zeros_like(values.take([0], axis=axis))
    running = np.concatenate([start, values.cumsum(axis=axis, dtype=np.float64)], axis=axis)
    first, last = np.asarray(spans).T
    last = np.maximum(last + 1, first)
    return np.asarray(running.take(last, axis=axis) - running.take(first, axis=axis))
