"""What the receiver of a stream of frames tells its sender, and how that is asked for."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

from edgetrain.errors import ChecksumError, WireError

MAGIC: Final = b"EDGR"
VERSION: Final = 1

# A sender has no more frames than this under way, so that a receipt can name each of them.
FRAMES_AHEAD: Final = 1024

# Every receiver takes so much at least, so a sender may begin before it has heard anything.
LEAST_WINDOW_BYTES: Final = 1 << 20

# Beside its body: what a frame's and a message's records take at either end.
_RECORD_BYTES: Final = 512

# magic, version, kind, reserved, run, epoch, origin, low, turn, consumed, window; then the
# bitmap and the checksum.
_FIELDS: Final = struct.Struct("<4sBBHIIIQQQQ")
_CRC: Final = struct.Struct("<I")
_RECEIPT: Final = 1
_ASK: Final = 2


@dataclass(frozen=True, slots=True)
class Receipt:
    """What has come of one stream.

    Attributes:
        run, epoch, origin: of the stream.
        low: all frames with a lower sequence have come.
        turn: the highest that has come, plus one; 0 before the first.
        consumed_bytes: charges of all messages that were taken so far.
        window_bytes: messages not taken may be charged so much; one may always come.
        beyond: bit i of it, from the lowest of the first byte: frame `low + i` has come.
    """

    run: int
    epoch: int
    origin: int
    low: int
    turn: int
    consumed_bytes: int
    window_bytes: int
    beyond: bytes = b""

    def has(self, sequence: int) -> bool:
        """Whether that frame has come."""
        ahead = sequence - self.low
        if ahead < 0:
            return True
        byte, bit = divmod(ahead, 8)
        return byte < len(self.beyond) and bool(self.beyond[byte] >> bit & 1)


@dataclass(frozen=True, slots=True)
class Ask:
    """Please send a receipt for the stream: one may have been lost."""

    run: int
    epoch: int


Note = Receipt | Ask


def charge_bytes(total_bytes: int, chunks: int) -> int:
    """What a message counts for in a window: its body, and what keeping it costs."""
    return total_bytes + _RECORD_BYTES * chunks


def encode_note(note: Note) -> bytes:
    match note:
        case Ask(run, epoch):
            kind, fields, beyond = _ASK, (run, epoch, 0, 0, 0, 0, 0), b""
        case Receipt():
            kind, beyond = _RECEIPT, note.beyond
            counts = (note.low, note.turn, note.consumed_bytes, note.window_bytes)
            fields = (note.run, note.epoch, note.origin, *counts)
    head = _FIELDS.pack(MAGIC, VERSION, kind, 0, *fields) + beyond
    return head + _CRC.pack(zlib.crc32(head))


def parse_note(data: bytes | bytearray | memoryview) -> Note:
    """Read a receipt or the wish for one.

    Raises:
        ChecksumError: damaged in transit.
        WireError: neither of this version.
    """
    view = memoryview(data)
    beyond_bytes = view.nbytes - _FIELDS.size - _CRC.size
    if not 0 <= beyond_bytes <= FRAMES_AHEAD // 8:
        raise WireError(f"{view.nbytes} B are no receipt")
    magic, version, kind, reserved, *fields = _FIELDS.unpack_from(view)
    run, epoch, *counts = fields
    if magic != MAGIC or version != VERSION:
        raise WireError(f"not a receipt of version {VERSION}")
    head = view[: -_CRC.size]
    if zlib.crc32(head) != _CRC.unpack_from(view, head.nbytes)[0]:
        raise ChecksumError("receipt damaged in transit: its checksum does not match")
    beyond = bytes(head[_FIELDS.size :])
    if kind == _RECEIPT and not reserved:
        return Receipt(run, epoch, *counts, beyond)  # type: ignore[call-arg]
    if kind == _ASK and not (reserved or beyond or any(counts)):
        return Ask(run, epoch)
    raise WireError(f"receipt of unknown kind {kind}")
