"""The one thread that publishes a party's tensors, and sees to it that they arrive."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final

import numpy.typing as npt

from edgetrain.errors import FlowError, TransportError, WireError
from edgetrain.runtime.inbox import Inbox, StreamKey
from edgetrain.transport.base import Transport
from edgetrain.transport.reliable import Sender, Urgency
from edgetrain.wire.encoded import Encoded
from edgetrain.wire.frame import Address, Kind, Parcel, wire_bytes
from edgetrain.wire.reassembly import Message, direct
from edgetrain.wire.receipt import Receipt, encode_note
from edgetrain.wire.topics import Channel

log = logging.getLogger(__name__)

Body = npt.NDArray[Any] | Encoded | bytes

# A worker begins no other forward while more than this waits to be acknowledged.
ROOM_BYTES: Final = 64 << 20
PATIENCE_S: Final = 60.0  # without a word from a peer that something waits for
_DRAIN_S: Final = 2.0

_SILENT: Final = (
    "it hangs, its connection is broken, or the broker drops packets as large as these"
    " (mosquitto: max_packet_size, message_size_limit; iotcore: max_payload_size)"
)
_BULK: Final = frozenset({Kind.BUNDLE, Kind.WEIGHTS, Kind.STATE})


# Is told the peer, run, epoch and reason.
Undelivered = Callable[[str, int, int, str], None]


@dataclass(frozen=True, slots=True)
class _Item:
    to: str
    address: Address
    body: Body
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class _Heard:
    peer: str
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class _Forget:
    run: int


class _Wake:
    pass


_Event = _Item | _Heard | _Forget | _Wake | None


class Outbox:
    """Takes tensors from workers without making them wait, and delivers them.

    What is needed soonest goes first. A tensor is kept until its receiver has acknowledged
    it. What is meant for this very party is handed over directly and never leaves it.

    What bounds it is the schedule and how far a run may be ahead of its last commit; and
    that whoever looks at `room` begins nothing new while there is none.

    Args:
        transport: where frames go.
        inbox: of the same party; the receipts it gives are sent here.
        deliver: takes messages for this party.
        undelivered: is told, on a thread of this, when a peer cannot be reached.
        patience_s: how long a peer may be silent while something waits for it.
    """

    def __init__(
        self,
        transport: Transport,
        inbox: Inbox,
        deliver: Callable[[Message], None],
        undelivered: Undelivered,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._transport = transport
        self._inbox = inbox
        self._deliver = deliver
        self._undelivered = undelivered
        self._patience_s = patience_s
        self._queue: SimpleQueue[_Event] = SimpleQueue()
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._senders: dict[StreamKey, Sender] = {}
        self._given_up: set[StreamKey] = set()
        self._due_s = math.inf
        self._end_s = math.inf
        name = f"{transport.name}.outbox"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        inbox.attach(self)

    @property
    def room(self) -> bool:
        """Whether what is not acknowledged yet leaves room for more."""
        held_bytes = sum(sender.held_bytes for sender in tuple(self._senders.values()))
        return self._queued_bytes + held_bytes < ROOM_BYTES

    def put(self, to: str, address: Address, body: Body, *, chunk_bytes: int) -> int:
        """Queue a tensor or bytes, which must not change afterwards.

        Returns:
            The bytes this puts on the wire, headers included, if nothing is sent again.
        """
        if to == self._transport.name:
            self._deliver(direct(address, body))
            return 0
        size = _nbytes(body)
        with self._lock:
            self._queued_bytes += size
        self._queue.put(_Item(to, address, body, chunk_bytes))
        return wire_bytes(size, chunk_bytes)

    def forget(self, run: int) -> None:
        """Drop whatever of a run is not delivered yet."""
        self._queue.put(_Forget(run))

    def hear(self, peer: str, receipt: Receipt) -> None:
        """Take in a receipt, from any thread."""
        self._queue.put(_Heard(peer, receipt))

    def wake(self) -> None:
        """See `Sending.wake`."""
        self._queue.put(_Wake())

    def broken(self, key: StreamKey, reason: str) -> None:
        """See `Sending.broken`."""
        self._undelivered(*key, reason)

    def close(self) -> None:
        """Deliver what is queued, as far as that takes a moment, then stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            sent = self._send()
            if not sent or time.monotonic() >= self._due_s:
                self._due_s = self._attend()
            if self._end_s < math.inf and self._ended():
                return
            self._take(-math.inf if sent else min(self._due_s, self._end_s))

    def _ended(self) -> bool:
        return time.monotonic() >= self._end_s or (
            self._queue.empty() and all(s.idle for s in self._senders.values())
        )

    def _take(self, until_s: float) -> None:
        """Handle all that has come in; if there is nothing, wait for it."""
        wait_s = None if until_s == math.inf else until_s - time.monotonic()
        try:
            if wait_s is None or wait_s > 0:
                self._handle(self._queue.get(timeout=wait_s))
            while True:
                self._handle(self._queue.get_nowait())
        except Empty:
            return

    def _handle(self, event: _Event) -> None:
        match event:
            case _Item():
                self._offer(event)
            case _Heard(peer, receipt):
                self._hear(StreamKey(peer, receipt.run, receipt.epoch), receipt)
            case _Forget(run):
                for key in [key for key in self._senders if key.run == run]:
                    del self._senders[key]
            case _Wake():
                self._due_s = -math.inf
            case None:
                self._end_s = time.monotonic() + _DRAIN_S

    def _offer(self, item: _Item) -> None:
        address, now_s = item.address, time.monotonic()
        key = StreamKey(item.to, address.run, address.epoch)
        with self._lock:
            self._queued_bytes -= _nbytes(item.body)
        if key in self._given_up:
            return
        try:
            parcel = Parcel(address, item.body, item.chunk_bytes)
        except WireError as error:
            self._give_up(key, str(error))
            return
        if key not in self._senders:
            self._supersede(key)
            self._senders[key] = Sender(key.run, key.epoch, secrets.randbits(32))
        self._senders[key].offer(_urgency(address, next(self._order)), parcel, now_s)

    def _supersede(self, key: StreamKey) -> None:
        """Drop what the same peer was sent under older plans of the run."""
        for old in [k for k in self._senders if (k.peer, k.run) == (key.peer, key.run)]:
            if old.epoch < key.epoch:
                del self._senders[old]

    def _hear(self, key: StreamKey, receipt: Receipt) -> None:
        sender = self._senders.get(key)
        if sender is None:
            return
        try:
            sender.hear(receipt, time.monotonic())
        except FlowError as error:
            self._give_up(key, str(error))

    def _send(self) -> bool:
        """Send the frame that is needed soonest; False when none may go."""
        ready = [
            (urgency, key)
            for key, sender in self._senders.items()
            if (urgency := sender.urgency()) is not None
        ]
        if not ready:
            return False
        _, key = min(ready)
        piece = self._senders[key].next(time.monotonic())
        if piece is None:
            return False
        try:
            frame = piece.parcel.frame(piece.chunk, piece.ticket)
            self._transport.send(key.peer, Channel.DATA, frame)
        except (TransportError, WireError) as error:
            self._give_up(key, str(error))
        return True

    def _attend(self) -> float:
        """Send receipts and look at the time; when to do it again."""
        now_s = time.monotonic()
        receipts, due_s = self._inbox.due(now_s)
        for peer, receipt in receipts:
            self._tell(peer, receipt)
        for key, sender in tuple(self._senders.items()):
            if sender.quiet_s(now_s) > self._patience_s:
                reason = f"no answer from {key.peer} for {self._patience_s:g} s"
                self._give_up(key, f"{reason}: {_SILENT}")
                continue
            if sender.due_s <= now_s:
                ask = sender.expire(now_s)
                if ask is None:
                    return -math.inf  # there is something to be sent again
                self._tell(key.peer, encode_note(ask))
            due_s = min(due_s, sender.due_s)
        return due_s

    def _tell(self, peer: str, note: bytes) -> None:
        try:
            self._transport.send(peer, Channel.FLOW, note)
        except TransportError as error:
            log.warning("%s: no receipt sent to %s: %s", self._transport.name, peer, error)

    def _give_up(self, key: StreamKey, reason: str) -> None:
        """Drop a stream for good, and say so."""
        self._senders.pop(key, None)
        self._given_up.add(key)
        log.warning("%s: nothing more is sent to %s: %s", self._transport.name, key, reason)
        if self._end_s == math.inf:
            self._undelivered(*key, reason)


def _urgency(address: Address, order: int) -> Urgency:
    """Training before evaluation before bulk; early microbatches first."""
    kind = 2 if address.kind in _BULK else int(address.evaluation)
    return kind, address.step, address.microbatch, order


def _nbytes(body: Body) -> int:
    return len(body) if isinstance(body, bytes) else body.nbytes
