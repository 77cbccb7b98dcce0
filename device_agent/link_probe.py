"""Measures a device's way to the broker, by messages from the device to itself."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from edgetrain.device_profile import LinkProfile
from edgetrain.errors import TransportError
from edgetrain.transport.base import Inbound, Transport
from edgetrain.wire.topics import Channel

PINGS: Final = 20
WARM_UPS: Final = 3
MESSAGES: Final = (16 << 10, 240 << 10)  # bytes: on slow links, and as runs send them
QUICK_S: Final = 0.05  # round trip of the small one, under which the large one is sent
LEAST: Final = 8  # messages of a stream
MOST: Final = 64
WAIT_S: Final = 20.0


def measure_link(
    transport: Transport,
    *,
    clock: Callable[[], float],
    stream_s: float = 1.0,
    wait_s: float = WAIT_S,
) -> LinkProfile:
    """Latency and bandwidth of the way to the broker; see `LinkProfile`.

    Args:
        transport: of this device, not open yet; closed on return.
        clock: seconds, monotonic.
        stream_s: about how long to send for bandwidth.
        wait_s: how long a message may take to come back.

    Raises:
        TransportError: the broker cannot be reached, refuses us, or messages do not come
            back.
    """
    echo = _Echo(transport, clock, wait_s)
    transport.open(echo.receive)
    try:
        for _ in range(WARM_UPS):
            echo.round_trip(0)
        empty_s = statistics.median(echo.round_trip(0) for _ in range(PINGS))
        nbytes = MESSAGES[echo.round_trip(MESSAGES[0]) < QUICK_S]
        large_s = echo.round_trip(nbytes)
        count = min(MOST, max(LEAST, round(stream_s / large_s)))
        return LinkProfile(empty_s / 2, echo.stream(nbytes, count))
    finally:
        transport.close()


class _Echo:
    """Sends numbered messages to its own transport's name and waits for them."""

    def __init__(
        self, transport: Transport, clock: Callable[[], float], wait_s: float
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._wait_s = wait_s
        self._token = secrets.token_bytes(8)  # tells them from what others may send
        self._arrivals: SimpleQueue[float] = SimpleQueue()

    def receive(self, inbound: Inbound) -> None:
        if inbound.payload.startswith(self._token):
            self._arrivals.put(self._clock())

    def round_trip(self, nbytes: int) -> float:
        """Seconds from sending so many bytes until they are back."""
        start = self._clock()
        self._send(nbytes)
        return max(self._arrival() - start, 1e-9)

    def stream(self, nbytes: int, count: int) -> float:
        """Bytes a second, from the arrival of the first message to that of the last."""
        for _ in range(count):
            self._send(nbytes)
        arrivals = [self._arrival() for _ in range(count)]
        return (count - 1) * nbytes / max(arrivals[-1] - arrivals[0], 1e-9)

    def _send(self, nbytes: int) -> None:
        body = self._token + bytes(nbytes)
        self._transport.send(self._transport.name, Channel.DATA, body)

    def _arrival(self) -> float:
        try:
            return self._arrivals.get(timeout=self._wait_s)
        except Empty as error:
            raise TransportError(
                f"a message from {self._transport.name!r} to itself did not come back"
                f" in {self._wait_s:g} s: look whether the broker's rules let the device"
                " write to and read from its own inbox"
            ) from error
