"""Tensors and bytes as frames: a fixed header with a checksum, then a piece of the body.

A message travels as one frame or several. Nothing here opens a socket: bytes in, bytes out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from edgetrain.errors import ChecksumError, FrameTooLargeError, WireError
from edgetrain.wire.encoded import Encoded
from edgetrain.wire.ticket import NO_TICKET, Ticket

Body = npt.NDArray[Any] | Encoded | bytes | bytearray | memoryview

MAGIC: Final = b"EDGT"
VERSION: Final = 2
RAW: Final = 0  # of the codecs; a code, once given, keeps its meaning
LAST_CODEC: Final = 6  # see `edgetrain.wire.codec`

# magic, version, kind, flags, run, epoch, stage, tensor, step, microbatch, dtype, codec,
# reserved, message, sequence, turn, origin, chunk, chunks, total bytes, offset, body
# bytes; then the checksum.
_FIELDS: Final = struct.Struct("<4sBBHIIHHIIBBHIIIIIIQQI")
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CRC.size

# Large enough that the cost of a message is small beside that of its bytes, small enough
# that a broker with a 1 MB limit takes it and nothing waits long behind one.
DEFAULT_CHUNK_BYTES: Final = 256 * 1024

# A frame a little longer than the largest TCP segment (64 KiB on loopback) leaves a runt
# segment behind, and a broker without TCP_NODELAY keeps that until the receiver's delayed
# acknowledgement, 40 ms later. Bodies between these bounds are cut into smaller ones.
_STALL_ABOVE_BYTES: Final = 56 * 1024
_STALL_UP_TO_BYTES: Final = 96 * 1024

_EVALUATION: Final = 1  # the only flag

# Code 0 is plain bytes. A code, once given, keeps its meaning.
_DTYPES: Final[Mapping[int, np.dtype[Any]]] = {
    1: np.dtype(np.bool_),
    2: np.dtype(np.int8),
    3: np.dtype(np.uint8),
    4: np.dtype("<i2"),
    5: np.dtype("<u2"),
    6: np.dtype("<i4"),
    7: np.dtype("<u4"),
    8: np.dtype("<i8"),
    9: np.dtype("<u8"),
    10: np.dtype("<f2"),
    11: np.dtype("<f4"),
    12: np.dtype("<f8"),
    13: np.dtype(ml_dtypes.bfloat16),
}
_NAMES: Final[Mapping[int, str]] = {0: "", **{c: d.name for c, d in _DTYPES.items()}}
_CODES: Final[Mapping[str, int]] = {name: code for code, name in _NAMES.items()}


class Kind(IntEnum):
    """What a message carries."""

    ACTIVATION = 1
    COTANGENT = 2
    LABELS = 3
    BUNDLE = 4
    WEIGHTS = 5
    STATE = 6


_KINDS: Final[Mapping[int, Kind]] = {int(kind): kind for kind in Kind}
_ENCODED: Final = (Kind.ACTIVATION, Kind.COTANGENT)  # others always travel plainly


@dataclass(frozen=True, slots=True)
class Address:
    """Which message of a run it is; equal addresses are the same message.

    Attributes:
        stage: the stage it is for; the one it comes from when `kind` is WEIGHTS or STATE.
        tensor: its index in the manifest's list of tensors that cross the cut.
        evaluation: it belongs to an evaluation pass, whose steps count apart.
    """

    kind: Kind
    run: int
    epoch: int
    stage: int
    step: int = 0
    microbatch: int = 0
    tensor: int = 0
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """One parsed frame.

    Attributes:
        dtype: numpy's name of the tensor's type; empty for plain bytes.
        total_bytes, offset: size of the whole body, and where this piece goes in it.
        body: a view into the bytes it was parsed from.
        codec: what the tensor's body is written in.
    """

    address: Address
    dtype: str
    chunk: int
    chunks: int
    total_bytes: int
    offset: int
    body: memoryview
    ticket: Ticket = NO_TICKET
    codec: int = RAW


class Parcel:
    """A tensor or bytes, any frame of which can be made whenever it is wanted.

    The body must not change meanwhile: an array of any shape, encoded or not, or bytes. The
    shape does not travel: both ends know it from the manifest. Pieces of at most
    `chunk_bytes` are equal but for the last, and an empty body makes one frame.

    Raises:
        WireError: the array's type has no code.
    """

    __slots__ = ("_data", "_size", "_types", "address", "chunks")

    def __init__(self, address: Address, body: Body, chunk_bytes: int) -> None:
        self.address = address
        self._types, self._data = _flatten(body)
        self.chunks = _chunks(len(self._data), chunk_bytes)
        self._size = -(-len(self._data) // self.chunks)

    @property
    def total_bytes(self) -> int:
        return len(self._data)

    def frame(self, chunk: int, ticket: Ticket) -> bytearray:
        """The frame of one piece, which is copied once.

        Raises:
            WireError: a field of the address has no room.
        """
        offset = chunk * self._size
        piece = self._data[offset : offset + self._size]
        frame = bytearray(HEADER_BYTES + len(piece))
        memoryview(frame)[HEADER_BYTES:] = piece
        place = (*ticket, chunk, self.chunks, len(self._data), offset)
        _write_header(frame, self.address, self._types, place)
        return frame


def frames(address: Address, body: Body, *, chunk_bytes: int) -> Iterator[bytearray]:
    """Cut a tensor or bytes into frames, the first ones of a stream: see `Parcel`."""
    parcel = Parcel(address, body, chunk_bytes)
    for chunk in range(parcel.chunks):
        yield parcel.frame(chunk, Ticket(0, chunk, chunk))


def parse(data: bytes | bytearray | memoryview, *, max_body_bytes: int) -> Frame:
    """Read one frame; its body is a view, not a copy.

    Raises:
        ChecksumError: damaged in transit.
        FrameTooLargeError: the body is over `max_body_bytes`.
        WireError: not a frame of this version, or its fields contradict each other.
    """
    view = memoryview(data)
    body = _check_envelope(view, max_body_bytes)
    (_, _, kind, flags, run, epoch, stage, tensor, step, microbatch, dtype, codec, reserved,
     message, sequence, turn, origin, *place) = _FIELDS.unpack_from(view)  # fmt: skip
    if kind not in _KINDS or dtype not in _NAMES:
        raise WireError(f"frame of unknown kind {kind} or type {dtype}")
    most = LAST_CODEC if dtype and kind in _ENCODED else RAW
    if flags & ~_EVALUATION or codec > most or reserved:
        raise WireError(f"frame with unknown flags {flags:#x} or codec {codec}")
    chunk, chunks, total_bytes, offset, _ = place
    if not _tiles(*place):
        raise WireError(
            f"frame's chunk {chunk} of {chunks} cannot be {body.nbytes} B at {offset} of"
            f" {total_bytes} B"
        )
    which = (run, epoch, stage, step, microbatch, tensor)
    address = Address(_KINDS[kind], *which, evaluation=flags == _EVALUATION)
    piece = (chunk, chunks, total_bytes, offset, body)
    ticket = Ticket(message, sequence, turn, origin)
    return Frame(address, _NAMES[dtype], *piece, ticket, codec)


def wire_bytes(nbytes: int, chunk_bytes: int) -> int:
    """What a body of `nbytes` takes on the wire as frames, headers included."""
    return nbytes + HEADER_BYTES * _chunks(nbytes, chunk_bytes)


def dtype_of(name: str) -> np.dtype[Any]:
    """The numpy type of a frame's dtype name.

    Raises:
        WireError: it cannot travel.
    """
    code = _CODES.get(name, 0)
    if code == 0:
        raise WireError(
            f"a tensor of type {name!r} cannot be sent; types: {list(_CODES)[1:]}"
        )
    return _DTYPES[code]


def _chunks(nbytes: int, chunk_bytes: int) -> int:
    """How many pieces, so that none but the last is shorter than the first."""
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}, at least 1 is needed")
    if nbytes == 0:
        return 1
    size = -(-nbytes // -(-nbytes // chunk_bytes))
    if _STALL_ABOVE_BYTES < size <= _STALL_UP_TO_BYTES:
        size = -(-nbytes // -(-nbytes // _STALL_ABOVE_BYTES))
    return -(-nbytes // size)


def _tiles(chunk: int, chunks: int, total_bytes: int, offset: int, body_bytes: int) -> bool:
    """Whether the piece is where `frames` would have cut it: then no two overlap."""
    if chunk >= chunks:
        return False
    size = -(-total_bytes // chunks)
    expected = min(size, total_bytes - offset)
    return (
        offset == chunk * size and body_bytes == expected and (expected > 0 or chunks == 1)
    )


def _flatten(body: Body) -> tuple[tuple[int, int], memoryview]:
    """Type and codec, and bytes; copies only what is not contiguous or little-endian."""
    if isinstance(body, Encoded):
        return (_CODES[dtype_of(body.dtype).name], body.codec), body.body.data
    if not isinstance(body, np.ndarray):
        return (0, RAW), memoryview(body).cast("B")
    dtype = dtype_of(body.dtype.name)
    flat = np.ascontiguousarray(body, dtype).reshape(-1)
    return (_CODES[dtype.name], RAW), flat.view(np.uint8).data


def _write_header(
    frame: bytearray, address: Address, types: tuple[int, int], place: tuple[int, ...]
) -> None:
    a = address
    flags = _EVALUATION if a.evaluation else 0
    body_bytes = len(frame) - HEADER_BYTES
    try:
        _FIELDS.pack_into(
            frame, 0, MAGIC, VERSION, a.kind, flags, a.run, a.epoch, a.stage, a.tensor,
            a.step, a.microbatch, *types, 0, *place, body_bytes,
        )  # fmt: skip
    except struct.error as error:
        raise WireError(f"{address} does not fit a frame's header: {error}") from error
    _CRC.pack_into(frame, _FIELDS.size, _checksum(memoryview(frame)))


def _checksum(frame: memoryview) -> int:
    """CRC-32 of the header's fields and the body."""
    return zlib.crc32(frame[HEADER_BYTES:], zlib.crc32(frame[: _FIELDS.size]))


def _check_envelope(view: memoryview, max_body_bytes: int) -> memoryview:
    """What can be said before the fields are trusted: magic, lengths, checksum."""
    if view.nbytes < HEADER_BYTES:
        raise WireError(
            f"{view.nbytes} B is shorter than a frame's {HEADER_BYTES} B header"
        )
    if bytes(view[:4]) != MAGIC or view[4] != VERSION:
        raise WireError(f"not a frame of version {VERSION}: it starts {bytes(view[:5])!r}")
    body = view[HEADER_BYTES:]
    if body.nbytes > max_body_bytes:
        raise FrameTooLargeError(f"frame body of {body.nbytes} B, limit {max_body_bytes} B")
    announced = _FIELDS.unpack_from(view)[-1]
    if body.nbytes != announced:
        raise WireError(f"frame body of {body.nbytes} B, its header says {announced} B")
    if _checksum(view) != _CRC.unpack_from(view, _FIELDS.size)[0]:
        raise ChecksumError("frame damaged in transit: its checksum does not match")
    return body
