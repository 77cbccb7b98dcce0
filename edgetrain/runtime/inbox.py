"""What comes in on the DATA channel, from whoever sends: whole messages, each once."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple, Protocol

from edgetrain.bundle import MAX_BUNDLE_BYTES
from edgetrain.errors import FlowError, WireError
from edgetrain.transport.base import Inbound
from edgetrain.transport.receipts import DEFAULT_RECEIVE_BYTES, Receiver
from edgetrain.wire.frame import Address, Frame, parse
from edgetrain.wire.reassembly import Message, Reassembler
from edgetrain.wire.receipt import FRAMES_AHEAD, Receipt, encode_note, parse_note
from edgetrain.wire.topics import Channel

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 2 << 20  # of a frame, over the limit of every broker of ours
MAX_STREAMS: Final = 512


class StreamKey(NamedTuple):
    """Names what one party sends another within one plan of a run."""

    peer: str
    run: int
    epoch: int


class Sending(Protocol):
    """The sending end of this party."""

    def hear(self, peer: str, receipt: Receipt) -> None: ...

    def wake(self) -> None:
        """There is a receipt to be sent sooner than was known."""
        ...

    def broken(self, key: StreamKey, reason: str) -> None:
        """A peer does not keep to its window."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may come.

    Attributes:
        window_bytes: of messages from one peer that were not taken yet.
        max_message_bytes: of one message.
    """

    window_bytes: int = DEFAULT_RECEIVE_BYTES
    max_message_bytes: int = MAX_BUNDLE_BYTES


class _Stream:
    __slots__ = ("broken", "origin", "reassembler", "receiver")

    def __init__(self, key: StreamKey, origin: int, bounds: Bounds) -> None:
        self.origin = origin
        name = (key.run, key.epoch, origin)
        self.receiver = Receiver(name, bounds.window_bytes)
        self.reassembler = Reassembler(
            bounds.max_message_bytes,
            max_open=FRAMES_AHEAD,
            max_open_bytes=bounds.window_bytes + bounds.max_message_bytes,
        )
        self.broken = False


class Inbox:
    """Takes frames and receipts, on the transport's threads; gives whole messages.

    Its memory is bounded whatever peers do: a window, or one message, for each of
    `MAX_STREAMS`. Frames of runs and epochs that are not admitted are dropped unread, and
    those of an epoch older than one the same peer has begun.

    Args:
        admits: whether a message with this address may come from this peer.
        bounds: how much may come.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        admits: Callable[[str, Address], bool],
        *,
        bounds: Bounds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._admits = admits
        self._bounds = bounds or Bounds()
        self._clock = clock
        self._sending: Sending | None = None
        self._lock = threading.Lock()
        self._streams: dict[StreamKey, _Stream] = {}
        self._past: deque[tuple[str, int]] = deque(maxlen=MAX_STREAMS)
        self._known_s = math.inf  # until when the sending end will look again by itself

    def attach(self, sending: Sending) -> None:
        """Say who sends receipts, and hears those that come."""
        self._sending = sending

    def receive(self, inbound: Inbound) -> Message | None:
        """Take a payload of the DATA or FLOW channel; give its message once that is whole.

        Raises:
            WireError: it is damaged, not admitted, or a peer's that does not keep to its
                window.
        """
        if inbound.channel is Channel.FLOW:
            self._note(inbound)
            return None
        frame = parse(inbound.payload, max_body_bytes=MAX_BODY_BYTES)
        address = frame.address
        if not self._admits(inbound.source, address):
            raise WireError(f"{address} is of a run or an epoch that is not under way here")
        key = StreamKey(inbound.source, address.run, address.epoch)
        try:
            with self._lock:
                message = self._feed(key, frame)
        except FlowError as error:
            if self._sending is not None:
                self._sending.broken(key, str(error))
            raise
        self._wake()
        return message

    def due(self, now_s: float) -> tuple[list[tuple[str, bytes]], float]:
        """The receipts to be sent now, by peer; and when to look again."""
        with self._lock:
            receipts = [
                (key.peer, encode_note(stream.receiver.receipt()))
                for key, stream in self._streams.items()
                if stream.receiver.due_s <= now_s
            ]
            self._known_s = self._due_s()
            return receipts, self._known_s

    def _note(self, inbound: Inbound) -> None:
        note = parse_note(inbound.payload)
        if isinstance(note, Receipt):
            if self._sending is not None:
                self._sending.hear(inbound.source, note)
            return
        with self._lock:
            key = StreamKey(inbound.source, note.run, note.epoch)
            if key in self._streams:
                self._streams[key].receiver.asked(self._clock())
        self._wake()

    def _feed(self, key: StreamKey, frame: Frame) -> Message | None:
        stream, origin = self._streams.get(key), frame.ticket.origin
        if stream is None or stream.origin != origin:
            stream = self._open(key, origin)
        if stream.broken:
            raise WireError(f"{key.peer} was cut off")
        try:
            if not stream.receiver.accept(frame, self._clock()):
                return None
            message = stream.reassembler.feed(frame)
        except WireError as error:
            stream.broken = True
            stream.reassembler = Reassembler(0)  # frees what was coming
            raise FlowError(f"{key.peer} is cut off: {error}") from error
        if message is None:
            return None
        taken = partial(self._taken, key, stream, frame.ticket.message)
        return replace(message, taken=taken)

    def _open(self, key: StreamKey, origin: int) -> _Stream:
        same = [k for k in self._streams if (k.peer, k.run) == (key.peer, key.run)]
        if (
            any(other.epoch > key.epoch for other in same)
            or (key.peer, origin) in self._past
        ):
            raise WireError(f"a frame of epoch {key.epoch}, which is over")
        for other in same:
            self._past.append((other.peer, self._streams.pop(other).origin))
        while len(self._streams) >= MAX_STREAMS:
            del self._streams[self._idlest(key.run)]
        stream = self._streams[key] = _Stream(key, origin, self._bounds)
        return stream

    def _idlest(self, run: int) -> StreamKey:
        """What can be spared: of another run, with nothing under way, the oldest."""
        keys = enumerate(self._streams.items())
        _, _, _, key = min(
            (key.run == run, stream.receiver.charged_bytes > 0, age, key)
            for age, (key, stream) in keys
        )
        return key

    def _taken(self, key: StreamKey, stream: _Stream, message: int) -> None:
        with self._lock:
            if self._streams.get(key) is not stream:
                return
            stream.receiver.consume(message, self._clock())
        self._wake()

    def _wake(self) -> None:
        """Have the sending end look sooner, if it must."""
        with self._lock:
            due_s = self._due_s()
            if due_s >= self._known_s:
                return
            self._known_s = due_s
        if self._sending is not None:
            self._sending.wake()

    def _due_s(self) -> float:
        return min((s.receiver.due_s for s in self._streams.values()), default=math.inf)
