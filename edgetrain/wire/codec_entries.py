"""Only some entries of a tensor: those that are not zero, or the largest.

Which ones is told by a bit for each entry of the tensor or by a number for each that is
sent, whichever is shorter.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from edgetrain.errors import WireError
from edgetrain.tensors import TensorSpec
from edgetrain.wire.codec_rows import INT8_LEVELS, quantise, rows_of
from edgetrain.wire.dither import Dither

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

_COUNT_BYTES: Final = 4
_SCALE_BYTES: Final = 4
_SMALL: Final = 1 << 16  # tensors of fewer entries number them in two bytes
_PAYS: Final = 0.95  # of the plain bytes; beyond, sparse is not worth its time
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)


def encode_sparse(array: Array) -> Bytes | None:
    """A bit for each entry, then those that are not zero, in order; None: no shorter.

    Error: none. What is left out has no bit set, so -0.0 and NaN come back as they were.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    kept = flat.view(f"u{flat.itemsize}") != 0
    count = int(np.count_nonzero(kept))
    nbytes = (flat.size + 7) // 8 + count * flat.itemsize
    if nbytes > _PAYS * flat.nbytes:
        return None
    values = np.compress(kept, flat)
    values = values.astype(flat.dtype.newbyteorder("<"), copy=False)
    return np.concatenate([np.packbits(kept), values.view(np.uint8)])


def decode_sparse(body: memoryview, tensor: TensorSpec) -> Array:
    """The inverse.

    Raises:
        WireError: bits and values do not fit each other and the tensor.
    """
    flat = np.frombuffer(body, np.uint8)
    bitmap_bytes = (tensor.elements + 7) // 8
    places = _unpacked(flat[:bitmap_bytes], tensor)
    dtype = np.dtype(tensor.dtype)
    if flat.size != bitmap_bytes + places.size * dtype.itemsize:
        raise WireError(f"{flat.size} B are no {tensor} with {places.size} entries")
    values = flat[bitmap_bytes:].view(dtype.newbyteorder("<"))
    out = np.zeros(tensor.elements, dtype)
    out[places] = values
    return out.reshape(tensor.shape)


def topk_bytes(tensor: TensorSpec, share: float) -> int:
    """Greatest length of a body with values of float32."""
    count = _count(tensor.elements, share)
    return _head_bytes(tensor) + _place_bytes(tensor.elements, count) + 4 * count


def topk8_bytes(tensor: TensorSpec, share: float) -> int:
    """Greatest length of a body with values of int8."""
    count = _count(tensor.elements, share)
    place_bytes = _place_bytes(tensor.elements, count)
    return _head_bytes(tensor) + place_bytes + _SCALE_BYTES + count


def encode_topk(array: Array, share: float) -> Bytes:
    """The largest magnitudes, ceil(share * n) of n, as float32; of equal ones the first.

    In place of the others in a row (see `codec_rows`) comes back their mean: sums over a
    row stay as they were, so what is trained on such activations does not miss what was
    left out when it then gets all of it.

    Error: what is sent is exact (for float32). With k sent of n, |x - x'|^2 is at most
    (1 - k / n) |x|^2, and no element is off by more than twice the k-th largest magnitude.
    NaN counts as larger than all, and what is left of it makes its row NaN.

    Source: Stich et al., Sparsified SGD with Memory, NeurIPS 2018; the means are ours.
    """
    flat, places = _largest(array, share)
    values = flat[places].astype("<f4", copy=False).view(np.uint8)
    return np.concatenate([_placed(flat, places, array.shape), values])


def encode_topk8(array: Array, share: float, dither: Dither) -> Bytes:
    """As `encode_topk`, with the values as one row of int8 (see `encode_int8`).

    Error: as there for the rest, and of what is sent s = largest magnitude / 127.
    """
    flat, places = _largest(array, share)
    scales, integers = quantise(flat[places], INT8_LEVELS, dither)
    scale = (scales if scales.size else np.zeros(1)).astype("<f4").view(np.uint8)
    values = integers.reshape(-1).view(np.uint8)
    return np.concatenate([_placed(flat, places, array.shape), scale, values])


def decode_topk(body: memoryview, tensor: TensorSpec) -> Array:
    """The inverse.

    Raises:
        WireError: the body contradicts itself or the tensor.
    """
    out, places, rest = _read_places(body, tensor, head_bytes=0, value_bytes=4)
    out[places] = rest.view("<f4")
    return _as_tensor(out, tensor)


def decode_topk8(body: memoryview, tensor: TensorSpec) -> Array:
    """The inverse.

    Raises:
        WireError: the body contradicts itself or the tensor.
    """
    head_bytes = _SCALE_BYTES
    out, places, rest = _read_places(body, tensor, head_bytes=head_bytes, value_bytes=1)
    values = rest[_SCALE_BYTES:].view(np.int8).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # of a scale that was made up
        values *= rest[:_SCALE_BYTES].view("<f4")
    out[places] = values
    return _as_tensor(out, tensor)


def _count(elements: int, share: float) -> int:
    return min(elements, math.ceil(share * elements))


def _place_bytes(elements: int, count: int) -> int:
    return min((elements + 7) // 8, count * _number_bytes(elements))


def _head_bytes(tensor: TensorSpec) -> int:
    """Of the number of entries and the rows' means."""
    return _COUNT_BYTES + 4 * rows_of(tensor.shape)[0]


def _number_bytes(elements: int) -> int:
    return 2 if elements <= _SMALL else 4


def _largest(array: Array, share: float) -> tuple[Floats, Array]:
    """The array, flat, and the places of its largest entries; zeros are never sent."""
    with np.errstate(over="ignore"):
        flat = np.ascontiguousarray(array, np.float32).reshape(-1)
    sizes = flat.view(np.uint32) & _MAGNITUDE  # in the order of magnitudes, NaN last
    count = _count(flat.size, share)
    if np.count_nonzero(sizes) <= count:
        return flat, np.flatnonzero(sizes)
    least = np.partition(sizes, flat.size - count)[flat.size - count]
    chosen = np.flatnonzero(sizes >= least)
    if chosen.size > count:
        equal = chosen[sizes[chosen] == least]
        surplus = equal[equal.size - (chosen.size - count) :]
        chosen = np.setdiff1d(chosen, surplus, assume_unique=True)
    return flat, chosen


def _placed(flat: Floats, places: Array, shape: tuple[int, ...]) -> Bytes:
    """How many entries, the means of the others, and where the entries are."""
    elements = flat.size
    kept = np.zeros(elements, np.bool_)
    kept[places] = True
    count = np.array([places.size], "<u4").view(np.uint8)
    means = _means(flat, kept, shape).astype("<f4", copy=False).view(np.uint8)
    if (elements + 7) // 8 <= places.size * _number_bytes(elements):
        return np.concatenate([count, means, np.packbits(kept)])
    numbers = places.astype(f"<u{_number_bytes(elements)}").view(np.uint8)
    return np.concatenate([count, means, numbers])


def _means(flat: Floats, kept: Array, shape: tuple[int, ...]) -> Floats:
    """Of what is not kept in each row; 0 where all is."""
    rows, columns = rows_of(shape)
    others = np.where(kept, np.float32(0), flat).reshape(rows, columns)
    left = columns - np.count_nonzero(kept.reshape(rows, columns), axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        means: Floats = others.sum(axis=1, dtype=np.float64) / np.maximum(left, 1)
        return means.astype(np.float32)


def _read_places(
    body: memoryview, tensor: TensorSpec, *, head_bytes: int, value_bytes: int
) -> tuple[Floats, Array, Bytes]:
    """The means in all places, the places of entries, and their values with a head."""
    flat = np.frombuffer(body, np.uint8)
    elements = tensor.elements
    count = int(flat[:_COUNT_BYTES].view("<u4")[0]) if flat.size >= _COUNT_BYTES else -1
    start = _head_bytes(tensor)
    stop = start + _place_bytes(elements, count)
    if not 0 <= count <= elements or flat.size != stop + head_bytes + count * value_bytes:
        raise WireError(f"{flat.size} B are no {count} entries of {tensor}")
    part = flat[start:stop]
    if (elements + 7) // 8 <= count * _number_bytes(elements):
        places: Array = _unpacked(part, tensor)
        if places.size != count:
            raise WireError(f"{places.size} entries of {tensor} marked, {count} announced")
    else:
        places = part.view(f"<u{_number_bytes(elements)}").astype(np.int64)
        if count and int(places.max()) >= elements:
            raise WireError(f"entry {places.max()} of {tensor}")
    means = flat[_COUNT_BYTES:start].view("<f4").astype(np.float32, copy=False)
    return np.repeat(means, rows_of(tensor.shape)[1]), places, flat[stop:]


def _unpacked(bitmap: Bytes, tensor: TensorSpec) -> Array:
    """The places of set bits."""
    if bitmap.size != (tensor.elements + 7) // 8:
        raise WireError(f"{bitmap.size} B are no bits for {tensor}")
    bits = np.unpackbits(bitmap).view(np.bool_)
    if bits[tensor.elements :].any():
        raise WireError(f"a bit is set beyond the end of {tensor}")
    return np.flatnonzero(bits)


def _as_tensor(values: Floats, tensor: TensorSpec) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.reshape(tensor.shape).astype(tensor.dtype, copy=False)
