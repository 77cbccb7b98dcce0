"""The one thread that publishes a device's tensors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from edgetrain.errors import TransportError, WireError
from edgetrain.transport.base import Transport
from edgetrain.wire.frame import Address, Encoded, frames, wire_bytes
from edgetrain.wire.reassembly import Message
from edgetrain.wire.topics import Channel

log = logging.getLogger(__name__)

Body = npt.NDArray[Any] | Encoded | bytes
Item = tuple[str, Address, Body, int]


class Outbox:
    """Takes tensors from workers without making them wait; frames and sends them in order.

    What is meant for this very device is handed over directly and never leaves it.

    Args:
        transport: where frames go.
        deliver: takes messages for this device.
    """

    def __init__(self, transport: Transport, deliver: Callable[[Message], None]) -> None:
        self._transport = transport
        self._deliver = deliver
        self._queue: SimpleQueue[Item | None] = SimpleQueue()
        name = f"{transport.name}.outbox"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, to: str, address: Address, body: Body, *, chunk_bytes: int) -> int:
        """Queue a tensor or bytes, which must not change afterwards.

        Returns:
            The bytes this puts on the wire, headers included.
        """
        if to == self._transport.name:
            self._deliver(_direct(address, body))
            return 0
        self._queue.put((to, address, body, chunk_bytes))
        size = len(body) if isinstance(body, bytes) else body.nbytes
        return wire_bytes(size, chunk_bytes)

    def close(self) -> None:
        """Send what is queued, then stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._publish(*item)
            del item  # else the tensor would stay until the next one

    def _publish(self, to: str, address: Address, body: Body, chunk_bytes: int) -> None:
        try:
            for frame in frames(address, body, chunk_bytes=chunk_bytes):
                self._transport.send(to, Channel.DATA, frame)
        except (TransportError, WireError) as error:
            log.warning("%s: not sent to %s: %s", self._transport.name, to, error)


def _direct(address: Address, body: Body) -> Message:
    if isinstance(body, bytes):
        return Message(address, "", memoryview(body))
    if isinstance(body, Encoded):
        view = body.body.data.toreadonly()
        return Message(address, body.dtype, view, body.codec)
    flat = np.ascontiguousarray(body).reshape(-1).view(np.uint8)
    return Message(address, body.dtype.name, flat.data.toreadonly())
