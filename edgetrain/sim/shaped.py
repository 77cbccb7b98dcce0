"""A transport behind a slow, late or broken link, over any other transport."""

from __future__ import annotations

import logging
import math
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np

from edgetrain.conditions import Conditions
from edgetrain.errors import TransportError, WireError
from edgetrain.sim.line import Line
from edgetrain.sim.timetable import Timetable
from edgetrain.transport.base import (
    DEFAULT_MAX_PAYLOAD_BYTES,
    DEFAULT_WINDOW_BYTES,
    Inbound,
    OnPresence,
    Payload,
    Presence,
    Receive,
    Transport,
    check_payload,
    deliver,
)
from edgetrain.transport.flow import SendWindow
from edgetrain.transport.traffic import Traffic
from edgetrain.wire.messages import Train, decode_command
from edgetrain.wire.topics import Channel

log = logging.getLogger(__name__)

_DRAIN_TIMEOUT_S: Final = 5.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Outbound:
    to: str
    channel: Channel
    payload: Payload


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much waits, and by which clock.

    Attributes:
        window_bytes: of each channel, that have not left.
        clock: seconds, monotonic.
    """

    window_bytes: int = DEFAULT_WINDOW_BYTES
    max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
    clock: Callable[[], float] = time.monotonic


class ShapedTransport:
    """Implements `Transport`: what goes through `inner` takes as long as the link does.

    Both directions have the link's rate and latency, each its own queue. `send` waits while
    a window of earlier bytes has not left, as without it. What waits to come down stays in
    memory here, where a broker would hold it.

    The first `Train` command that arrives starts the timetable.

    Args:
        inner: not yet open.
        conditions: of the device.
        timetable: made of the same conditions; its engine may read it too.
        die: called, on a thread of its own, when the timetable kills the device; by
            default the connection ends without a goodbye.
    """

    def __init__(
        self,
        inner: Transport,
        conditions: Conditions,
        timetable: Timetable,
        *,
        die: Callable[[], None] | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        bounds = bounds or Bounds()
        self.traffic = Traffic()
        self._inner = inner
        self._timetable = timetable
        self._die = die or self.kill
        self._clock = bounds.clock
        self._max_payload_bytes = bounds.max_payload_bytes
        self._windows = {channel: SendWindow(bounds.window_bytes) for channel in Channel}
        key = zlib.crc32(inner.name.encode())

        def line(way: int) -> Line[_T]:
            seed = np.random.SeedSequence([conditions.seed, key, way])
            return Line(conditions, timetable, np.random.Generator(np.random.PCG64(seed)))

        self._up = _Carrier[_Outbound](line(0), self._leave, bounds.clock)
        self._down = _Carrier[Inbound | Presence](line(1), self._arrive, bounds.clock)
        self._receive: Receive | None = None
        self._on_presence: OnPresence | None = None
        self._ended = threading.Event()
        self._opened = False

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def payload_limit_bytes(self) -> int:
        """See `Transport.payload_limit_bytes`."""
        return min(self._max_payload_bytes, self._inner.payload_limit_bytes)

    def open(
        self,
        receive: Receive,
        *,
        on_presence: OnPresence | None = None,
        announce: bytes | None = None,
    ) -> None:
        """See `Transport.open`. Connecting itself is not delayed."""
        if not self._opened:
            self._receive, self._on_presence = receive, on_presence
        watch = self._presence if on_presence is not None else None
        self._inner.open(self._inbound, on_presence=watch, announce=announce)
        self._opened = True
        self._up.start(f"{self.name}.uplink")
        self._down.start(f"{self.name}.downlink")

    def send(self, to: str, channel: Channel, payload: Payload) -> None:
        """See `Transport.send`."""
        nbytes = check_payload(payload, self._max_payload_bytes)
        if not self._opened:
            raise TransportError(f"{self.name}: the transport is not open")
        window = self._windows[channel]
        window.wait()
        window.add(nbytes)
        self.traffic.sent_bytes[channel] += nbytes
        # a view is of memory that its owner may use again before the message leaves
        kept = bytes(payload) if isinstance(payload, memoryview) else payload
        self._up.put(channel, _Outbound(to, channel, kept), nbytes)

    def withdraw(self) -> None:
        """See `Transport.withdraw`."""
        self._inner.withdraw()

    def close(self) -> None:
        """See `Transport.close`; what takes the link too long to send is lost."""
        if self._opened and not self._ended.is_set():
            self._inner.withdraw()
            self._up.drain(_DRAIN_TIMEOUT_S)
        self._end("is closed")
        self._inner.close()

    def kill(self) -> None:
        """See `Transport.kill`."""
        self._receive = self._on_presence = None
        self._inner.kill()
        self._end("was killed")

    def _end(self, why: str) -> None:
        self._ended.set()
        for window in self._windows.values():
            window.close(f"{self.name}: the transport {why}")
        self._up.stop()
        self._down.stop()

    def _leave(self, message: _Outbound, nbytes: int) -> None:
        """Hand a message to the real transport, on the uplink's thread."""
        try:
            self._inner.send(message.to, message.channel, message.payload)
        except TransportError as error:
            for window in self._windows.values():
                window.close(str(error))
        self._windows[message.channel].remove(nbytes)

    def _inbound(self, inbound: Inbound) -> None:
        self._down.put(inbound.channel, inbound, len(inbound.payload))

    def _presence(self, presence: Presence) -> None:
        self._down.put(Channel.CONTROL, presence, len(presence.payload))

    def _arrive(self, item: Inbound | Presence, nbytes: int) -> None:
        """Hand a message to its receiver, on the downlink's thread."""
        match item:
            case Presence() if self._on_presence is not None:
                deliver(self._on_presence, item)
            case Inbound() if self._receive is not None:
                self.traffic.received_bytes[item.channel] += nbytes
                if not self._timetable.started:
                    self._look_for_the_start(item)
                deliver(self._receive, item)

    def _look_for_the_start(self, inbound: Inbound) -> None:
        if inbound.channel is not Channel.CONTROL:
            return
        try:
            begins = isinstance(decode_command(inbound.payload), Train)
        except WireError:
            return  # the receiver's business
        if not begins:
            return
        self._timetable.start(self._clock())
        kill_at_s = self._timetable.kill_at_s
        if kill_at_s is not None:
            name = f"{self.name}.fate"
            threading.Thread(
                target=self._wait_to_die, args=(kill_at_s,), name=name, daemon=True
            ).start()

    def _wait_to_die(self, seconds: float) -> None:
        if not self._ended.wait(seconds):
            log.warning("%s: killed by its timetable", self.name)
            self._die()


def behind_link(
    inner: Transport,
    conditions: Conditions,
    timetable: Timetable,
    die: Callable[[], None] | None = None,
) -> Transport:
    """The transport of a simulated device: shaped, where there is something to shape."""
    if not conditions.shape_the_link:
        return inner
    return ShapedTransport(inner, conditions, timetable, die=die)


class _Carrier(Generic[_T]):
    """The thread that takes messages off a line when they are due."""

    def __init__(
        self, line: Line[_T], hand: Callable[[_T, int], None], clock: Callable[[], float]
    ) -> None:
        self._line = line
        self._hand = hand
        self._clock = clock
        self._changed = threading.Condition()
        self._stopped = False
        self._busy = False
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, channel: Channel, item: _T, nbytes: int) -> None:
        with self._changed:
            self._line.put(self._clock(), channel, item, nbytes)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Wait until the line is empty and all is handed over."""
        with self._changed:
            self._changed.wait_for(lambda: self._line.empty and not self._busy, timeout_s)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_DRAIN_TIMEOUT_S)

    def _run(self) -> None:
        while (arrived := self._take()) is not None:
            for item, nbytes in arrived:
                self._hand(item, nbytes)

    def _take(self) -> list[tuple[_T, int]] | None:
        """Wait for messages that are due; None when stopped."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while not self._stopped:
                now_s = self._clock()
                if arrived := self._line.due(now_s):
                    self._busy = True
                    return arrived
                wait_s = self._line.next_s() - now_s
                self._changed.wait(None if wait_s == math.inf else max(0.0, wait_s))
            return None
