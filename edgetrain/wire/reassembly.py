"""Joining the frames of one sender back into messages, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edgetrain.errors import FrameTooLargeError, WireError
from edgetrain.tensors import TensorSpec
from edgetrain.wire.codec import decode
from edgetrain.wire.encoded import Encoded
from edgetrain.wire.frame import RAW, Address, Frame, dtype_of


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Message:
    """A whole body; `dtype` is empty for plain bytes.

    Attributes:
        taken: to be called, from any thread, by whoever takes it off the queue it was put
            in: its sender may then send more.
    """

    address: Address
    dtype: str
    body: memoryview
    taken: Callable[[], None] = field(default=_nothing, compare=False, repr=False)
    codec: int = RAW

    def array(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """The body as an array of the shape the manifest gives; plain, without a copy.

        Raises:
            WireError: it is not a tensor, or not as long as the shape needs.
        """
        if self.codec != RAW:
            tensor = TensorSpec(str(self.address), dtype_of(self.dtype).name, shape)
            return decode(self.codec, self.body, tensor)
        flat = np.frombuffer(self.body, np.uint8)
        dtype = dtype_of(self.dtype)
        if flat.size != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
            raise WireError(
                f"{self.address}: {flat.size} B are no {self.dtype}{list(shape)}"
            )
        return flat.view(dtype).reshape(shape)


_Key = tuple[int, Address]


def direct(address: Address, body: npt.NDArray[Any] | Encoded | bytes) -> Message:
    """The message that a body arrives as which never leaves this process."""
    if isinstance(body, bytes):
        return Message(address, "", memoryview(body))
    if isinstance(body, Encoded):
        view = body.body.data.toreadonly()
        return Message(address, body.dtype, view, codec=body.codec)
    flat = np.ascontiguousarray(body).reshape(-1).view(np.uint8)
    return Message(address, body.dtype.name, flat.data.toreadonly())


@dataclass(slots=True)
class _Partial:
    """A message some of whose chunks are in.

    The buffer starts uninitialised, so that a false announcement costs no memory until
    bytes follow; once all chunks are in it is full, as `parse` saw to it that they tile it.
    """

    body: memoryview
    dtype: str
    codec: int
    chunks: int
    seen: set[int]


class Reassembler:
    """Joins frames in any order; a duplicate lands on itself.

    A message of one frame passes without a copy; one of several is written into a buffer
    of its size. Unfinished messages beyond the limits are dropped, oldest first, so that a
    lossy link cannot fill a small device's memory. A message that comes twice is delivered
    twice: whoever takes messages keeps their addresses apart.

    Attributes:
        dropped: unfinished messages given up so far.
    """

    def __init__(
        self,
        max_message_bytes: int,
        *,
        max_open: int = 64,
        max_open_bytes: int | None = None,
    ) -> None:
        """Set the limits; `max_open_bytes` is `max_message_bytes` unless given."""
        self.dropped = 0
        self._max_message_bytes = max_message_bytes
        self._max_open = max_open
        self._max_open_bytes = max(max_open_bytes or 0, max_message_bytes)
        self._open: dict[_Key, _Partial] = {}
        self._open_bytes = 0

    @property
    def open_bytes(self) -> int:
        """Memory held for unfinished messages."""
        return self._open_bytes

    def feed(self, frame: Frame) -> Message | None:
        """Add a frame; return its message once that is whole.

        Raises:
            FrameTooLargeError: the message is over `max_message_bytes`.
            WireError: the frame contradicts an earlier one of the same message.
        """
        if frame.total_bytes > self._max_message_bytes:
            raise FrameTooLargeError(
                f"message of {frame.total_bytes} B announced, the limit is"
                f" {self._max_message_bytes} B"
            )
        if frame.chunks == 1 and _key(frame) not in self._open:
            return Message(frame.address, frame.dtype, frame.body, codec=frame.codec)
        partial = self._partial(frame)
        partial.body[frame.offset : frame.offset + frame.body.nbytes] = frame.body
        partial.seen.add(frame.chunk)
        if len(partial.seen) < partial.chunks:
            return None
        self._close(_key(frame))
        body = partial.body.toreadonly()
        return Message(frame.address, partial.dtype, body, codec=partial.codec)

    def _partial(self, frame: Frame) -> _Partial:
        partial = self._open.get(_key(frame))
        if partial is None:
            return self._start(frame)
        theirs = (frame.total_bytes, frame.dtype, frame.codec, frame.chunks)
        if (partial.body.nbytes, partial.dtype, partial.codec, partial.chunks) != theirs:
            raise WireError(f"{frame.address}: frames disagree on its size, type or chunks")
        return partial

    def _start(self, frame: Frame) -> _Partial:
        """Open a buffer, making room first."""
        while self._open and (
            len(self._open) >= self._max_open
            or self._open_bytes + frame.total_bytes > self._max_open_bytes
        ):
            self._close(next(iter(self._open)))
            self.dropped += 1
        body = np.empty(frame.total_bytes, np.uint8).data
        partial = _Partial(body, frame.dtype, frame.codec, frame.chunks, set())
        self._open[_key(frame)] = partial
        self._open_bytes += frame.total_bytes
        return partial

    def _close(self, key: _Key) -> None:
        self._open_bytes -= self._open.pop(key).body.nbytes


def _key(frame: Frame) -> _Key:
    """A message that is sent anew, such as the same weights again, has another number."""
    return frame.ticket.message, frame.address
