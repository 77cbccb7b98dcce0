"""Tensors as fewer bytes, and back: one table of all codecs.

Each body holds all that its codec needs beside the tensor's type and shape, which both ends
know. Integers always travel plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from edgetrain.codec_spec import CodecSpec
from edgetrain.errors import WireError
from edgetrain.tensors import TensorSpec
from edgetrain.wire.codec_entries import (
    decode_sparse,
    decode_topk,
    decode_topk8,
    encode_sparse,
    encode_topk,
    encode_topk8,
    topk8_bytes,
    topk_bytes,
)
from edgetrain.wire.codec_rows import (
    decode_int4,
    decode_int8,
    encode_int4,
    encode_int8,
    int4_bytes,
    int8_bytes,
)
from edgetrain.wire.dither import Dither
from edgetrain.wire.encoded import Encoded

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to write a tensor of floats.

    Attributes:
        code: on the wire; once given, it keeps its meaning.
        encode: an array, the share to send, and random bytes, to a body; None: no shorter.
        decode: back to an array of the tensor's type and shape, or a WireError.
        most_bytes: that a body of the tensor takes, at a share.
    """

    code: int
    encode: Callable[[Array, float, Dither], Bytes | None]
    decode: Callable[[memoryview, TensorSpec], Array]
    most_bytes: Callable[[TensorSpec, float], int]


def encode_bf16(array: Array) -> Bytes:
    """The high half of each float32, rounded to nearest, ties to even.

    Error: at most 2^-8 of the element's magnitude, and 2^-134 below the normal range; what
    is above 3.39e38 comes back as infinity. NaN and infinity stay.
    """
    with np.errstate(over="ignore"):
        halves = np.ascontiguousarray(array, np.float32).astype(ml_dtypes.bfloat16)
    return halves.reshape(-1).view("u2").astype("<u2", copy=False).view(np.uint8)


def decode_bf16(body: memoryview, tensor: TensorSpec) -> Array:
    """The inverse.

    Raises:
        WireError: the body is not as long as the tensor needs.
    """
    if body.nbytes != 2 * tensor.elements:
        raise WireError(f"{body.nbytes} B are no {tensor} as bf16")
    halves = np.frombuffer(body, "<u2").astype("u2", copy=False).view(ml_dtypes.bfloat16)
    with np.errstate(over="ignore"):
        values: Array = halves.astype(tensor.dtype)
    return values.reshape(tensor.shape)


CODECS: Final[Mapping[str, Codec]] = {
    "bf16": Codec(
        1,
        lambda array, _share, _dither: encode_bf16(array),
        decode_bf16,
        lambda tensor, _share: 2 * tensor.elements,
    ),
    "int8": Codec(
        2,
        lambda array, _share, dither: encode_int8(array, dither),
        decode_int8,
        lambda tensor, _share: int8_bytes(tensor),
    ),
    "int4": Codec(
        3,
        lambda array, _share, dither: encode_int4(array, dither),
        decode_int4,
        lambda tensor, _share: int4_bytes(tensor),
    ),
    "topk": Codec(
        4,
        lambda array, share, _dither: encode_topk(array, share),
        decode_topk,
        topk_bytes,
    ),
    "topk8": Codec(5, encode_topk8, decode_topk8, topk8_bytes),
    "sparse": Codec(
        6,
        lambda array, _share, _dither: encode_sparse(array),
        decode_sparse,
        lambda tensor, _share: tensor.nbytes,
    ),
}
_BY_CODE: Final[Mapping[int, Codec]] = {codec.code: codec for codec in CODECS.values()}


def encode(spec: CodecSpec, array: Array, dither: Dither) -> Array | Encoded:
    """The array in a codec, or as it is where that would be no longer.

    Args:
        spec: the codec; ``raw`` and all others leave what is not floats as it is.
        array: of any shape and layout.
        dither: random bytes, for those that round at random.
    """
    if spec.name not in CODECS or array.dtype.kind != "f":
        return array
    codec = CODECS[spec.name]
    body = codec.encode(array, spec.share, dither)
    if body is None or body.nbytes >= array.nbytes:
        return array
    return Encoded(array.dtype.name, codec.code, body)


def decode(code: int, body: memoryview, tensor: TensorSpec) -> Array:
    """What `encode` was given, as far as the codec kept it.

    Raises:
        WireError: the code is unknown, or the body is none of such a tensor.
    """
    if code not in _BY_CODE or not tensor.is_float:
        raise WireError(f"{tensor} cannot be in codec {code}")
    return _BY_CODE[code].decode(body, tensor)


def most_bytes(spec: CodecSpec, tensor: TensorSpec) -> int:
    """The most bytes that the tensor's body takes; ``adaptive`` counts as plain."""
    if spec.name not in CODECS or not tensor.is_float:
        return tensor.nbytes
    return min(tensor.nbytes, CODECS[spec.name].most_bytes(tensor, spec.share))
