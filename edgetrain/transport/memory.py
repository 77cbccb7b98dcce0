"""A network inside one process, for tests and simulated fleets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from edgetrain.errors import TransportError
from edgetrain.transport.base import (
    DEFAULT_MAX_PAYLOAD_BYTES,
    DEFAULT_WINDOW_BYTES,
    Inbound,
    OnPresence,
    Payload,
    Presence,
    Receive,
    check_payload,
    deliver,
)
from edgetrain.transport.flow import SendWindow
from edgetrain.transport.traffic import Traffic
from edgetrain.wire.topics import Channel, check_name

# Sees source, receiver, channel and payload of every message, on the sender's thread.
Tap = Callable[[str, str, Channel, bytes], None]


class MemoryHub:
    """What the broker is to MQTT: routes, and keeps presences.

    As there, a message to a name nobody bears is dropped, and two may bear one name.
    """

    def __init__(self, *, tap: Tap | None = None) -> None:
        self._tap = tap
        self._lock = threading.Lock()
        self._parties: list[MemoryTransport] = []
        self._presences: dict[str, bytes] = {}

    def join(self, party: MemoryTransport) -> None:
        with self._lock:
            self._parties.append(party)
            for device, payload in self._presences.items():
                party.enqueue(Presence(device, payload))

    def leave(self, party: MemoryTransport) -> None:
        with self._lock:
            if party in self._parties:
                self._parties.remove(party)

    def announce(self, presence: Presence) -> None:
        """Keep a presence and tell everyone; an empty one is told and forgotten."""
        with self._lock:
            self._presences[presence.device] = presence.payload
            if presence.gone:
                del self._presences[presence.device]
            for party in self._parties:
                party.enqueue(presence)

    def route(self, to: str, inbound: Inbound, window: SendWindow) -> None:
        """Queue a message at its receiver, whose thread takes it out of the window."""
        if self._tap is not None:
            self._tap(inbound.source, to, inbound.channel, inbound.payload)
        with self._lock:
            for party in self._parties:
                if party.name == to:
                    window.add(len(inbound.payload))
                    party.enqueue(inbound, window)


class MemoryTransport:
    """Implements `Transport` over a `MemoryHub`; delivers on one thread of its own."""

    def __init__(
        self,
        hub: MemoryHub,
        name: str,
        *,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        self._hub = hub
        self.name = check_name(name, allow_coordinator=True)
        self._max_payload_bytes = max_payload_bytes
        self._windows = {channel: SendWindow(window_bytes) for channel in Channel}
        self.traffic = Traffic()
        self._queue: SimpleQueue[tuple[Inbound | Presence | None, SendWindow | None]]
        self._queue = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._receive: Receive | None = None
        self._on_presence: OnPresence | None = None
        self._announced = False

    @property
    def payload_limit_bytes(self) -> int:
        """See `Transport.payload_limit_bytes`."""
        return self._max_payload_bytes

    def open(
        self,
        receive: Receive,
        *,
        on_presence: OnPresence | None = None,
        announce: bytes | None = None,
    ) -> None:
        """See `Transport.open`."""
        if self._thread is not None:
            raise TransportError(f"{self.name}: a transport opens once; make another")
        self._receive, self._on_presence = receive, on_presence
        self._thread = threading.Thread(
            target=self._dispatch, name=f"memory-{self.name}", daemon=True
        )
        self._thread.start()
        self._hub.join(self)
        if announce is not None:
            self._announced = True
            self._hub.announce(Presence(self.name, announce))

    def send(self, to: str, channel: Channel, payload: Payload) -> None:
        """See `Transport.send`."""
        nbytes = check_payload(payload, self._max_payload_bytes)
        if self._thread is None:
            raise TransportError(f"{self.name}: the transport is not open")
        window = self._windows[channel]
        window.wait()
        self._hub.route(to, Inbound(self.name, channel, bytes(payload)), window)
        self.traffic.sent_bytes[channel] += nbytes

    def withdraw(self) -> None:
        """See `Transport.withdraw`."""
        if self._announced:
            self._announced = False
            self._hub.announce(Presence(self.name, b""))

    def close(self) -> None:
        """See `Transport.close`."""
        self.withdraw()
        self._end("is closed")

    def kill(self) -> None:
        """See `Transport.kill`."""
        self._receive = self._on_presence = None
        self.withdraw()
        self._end("was killed")

    def enqueue(self, item: Inbound | Presence, window: SendWindow | None = None) -> None:
        """Take an item from the hub."""
        self._queue.put((item, window))

    def _end(self, why: str) -> None:
        self._hub.leave(self)
        for window in self._windows.values():
            window.close(f"{self.name}: the transport {why}")
        self._queue.put((None, None))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _dispatch(self) -> None:
        while True:
            item, window = self._queue.get()
            match item:
                case None:
                    return
                case Presence() if self._on_presence is not None:
                    deliver(self._on_presence, item)
                case Inbound() if self._receive is not None:
                    self.traffic.received_bytes[item.channel] += len(item.payload)
                    deliver(self._receive, item)
            if window is not None and isinstance(item, Inbound):
                window.remove(len(item.payload))
