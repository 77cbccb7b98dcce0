"""Floats as small integers with a scale for each row: int8, and int4 two to a byte.

A body holds the rows' scales as float32, then the integers. A row is a tensor's last axis,
with as many of those before it as it takes to have 64 elements, the first one apart: that
counts samples, and each keeps a scale of its own. So scales are at most 1/16 of int8's
bytes, unless samples are small.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgetrain.errors import WireError
from edgetrain.tensors import TensorSpec
from edgetrain.wire.dither import Dither, draw

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int8]

INT8_LEVELS: Final = 127
INT4_LEVELS: Final = 7
_LEAST_ROW: Final = 64
_BLOCK: Final = 1 << 15  # elements: the buffers of one stay in a core's own cache
_LEAST_SCALE: Final = np.float32(2.0**-118)  # 256 / scale is finite
_FURTHEST: Final = np.finfo(np.float32).max


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many rows, and elements in each."""
    columns, axis = 1, len(shape)
    while axis > 0 and columns < _LEAST_ROW and (axis > 1 or len(shape) == 1):
        axis -= 1
        columns *= shape[axis]
    rows = 1
    for extent in shape[:axis]:
        rows *= extent
    return (rows, columns) if rows * columns else (0, 0)


def int8_bytes(tensor: TensorSpec) -> int:
    """Length of a body."""
    rows, columns = rows_of(tensor.shape)
    return 4 * rows + rows * columns


def int4_bytes(tensor: TensorSpec) -> int:
    """Length of a body."""
    rows, columns = rows_of(tensor.shape)
    return 4 * rows + (rows * columns + 1) // 2


def encode_int8(array: npt.NDArray[Any], dither: Dither) -> Bytes:
    """127 steps each way, rounded at random so that the expectation is right.

    Error: with s = max(largest magnitude in the row / 127, 2^-118), every element comes
    back within s, and over the random bytes its mean is within s / 500. Zeros stay zeros. A
    row that is not all finite comes back as NaN, so that a run that diverges is seen to.

    Source: Gupta et al., Deep Learning with Limited Numerical Precision, ICML 2015,
    for the rounding; 8 random bits an element, and scales by row, are ours.
    """
    scales, integers = quantise(array, INT8_LEVELS, dither)
    return np.concatenate([_as_bytes(scales), integers.reshape(-1).view(np.uint8)])


def decode_int8(body: memoryview, tensor: TensorSpec) -> npt.NDArray[Any]:
    """The inverse.

    Raises:
        WireError: the body is not as long as the tensor needs.
    """
    scales, rest = _parts(body, tensor, int8_bytes(tensor))
    return _scaled(rest.view(np.int8), scales, tensor)


def encode_int4(array: npt.NDArray[Any], dither: Dither) -> Bytes:
    """As `encode_int8`, with 7 steps each way: s = max(largest magnitude / 7, 2^-118).

    The first of two elements is in a byte's low half.
    """
    scales, integers = quantise(array, INT4_LEVELS, dither)
    flat = integers.reshape(-1)
    packed = np.zeros((flat.size + 1) // 2, np.uint8)
    np.bitwise_and(flat[::2].view(np.uint8), 15, out=packed)
    packed[: flat.size // 2] |= flat[1::2].view(np.uint8) << 4
    return np.concatenate([_as_bytes(scales), packed])


def decode_int4(body: memoryview, tensor: TensorSpec) -> npt.NDArray[Any]:
    """The inverse.

    Raises:
        WireError: the body is not as long as the tensor needs.
    """
    scales, rest = _parts(body, tensor, int4_bytes(tensor))
    pairs = np.empty((rest.size, 2), np.int8)
    np.left_shift(rest.view(np.int8), 4, out=pairs[:, 0])
    pairs[:, 1] = rest.view(np.int8)
    pairs >>= 4
    return _scaled(pairs.reshape(-1)[: tensor.elements], scales, tensor)


def quantise(
    array: npt.NDArray[Any], levels: int, dither: Dither
) -> tuple[Floats, Integers]:
    """Scales [rows] and integers [rows, columns] of an array of floats.

    An element in steps of 1/256 level, plus a random byte, has the integer in its high
    byte: one addition rounds it at random. Time O(n), memory of the result and a block.
    """
    rows, columns = rows_of(array.shape)
    integers = np.empty((rows, columns), np.int8)
    if not rows:
        return np.zeros(0, np.float32), integers
    with np.errstate(over="ignore"):  # of float64, to infinity
        values = np.ascontiguousarray(array, np.float32).reshape(rows, columns)
    scales, factors = _scales(values, levels)
    finite = np.isfinite(scales)
    if not finite.all():
        values = np.where(finite[:, None], values, np.float32(0))
    height, width = max(1, _BLOCK // columns), min(columns, _BLOCK)
    steps = np.empty((height, width), np.float32)
    sums = np.empty((height, width), np.int16)
    generator = dither.generator()
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            place = np.s_[top : top + height, left : left + width]
            block = values[place]
            within = np.s_[: block.shape[0], : block.shape[1]]
            step, total = steps[within], sums[within]
            np.multiply(block, factors[top : top + height, None], out=step)
            np.rint(step, out=step)
            np.copyto(total, step, casting="unsafe")
            total += draw(generator, block.size).reshape(block.shape)
            total >>= 8
            np.copyto(integers[place], total, casting="unsafe")
    return scales, integers


def _scales(values: Floats, levels: int) -> tuple[Floats, Floats]:
    """Of each row: a level's worth, and 1/256 levels a unit; NaN and 0 if not finite."""
    largest = np.maximum(values.max(axis=1), -values.min(axis=1))
    most = np.nextafter(_FURTHEST / np.float32(levels), np.float32(0))  # comes back finite
    scales = np.clip(largest / np.float32(levels), _LEAST_SCALE, most)
    scales[~np.isfinite(largest)] = np.nan
    scales[largest == 0] = 0
    factors = np.zeros_like(scales)
    np.divide(np.float32(256), scales, out=factors, where=scales > 0)
    return scales, factors


def _parts(body: memoryview, tensor: TensorSpec, nbytes: int) -> tuple[Floats, Bytes]:
    if body.nbytes != nbytes:
        raise WireError(f"{body.nbytes} B are no encoded {tensor}: {nbytes} B are expected")
    flat = np.frombuffer(body, np.uint8)
    rows = rows_of(tensor.shape)[0]
    return flat[: 4 * rows].view("<f4").astype(np.float32, copy=False), flat[4 * rows :]


def _scaled(integers: Integers, scales: Floats, tensor: TensorSpec) -> npt.NDArray[Any]:
    rows, columns = rows_of(tensor.shape)
    out = integers.reshape(rows, columns).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # of scales that were made up
        out *= scales[:, None]
        return out.reshape(tensor.shape).astype(tensor.dtype, copy=False)


def _as_bytes(scales: Floats) -> Bytes:
    return scales.astype("<f4", copy=False).view(np.uint8)
