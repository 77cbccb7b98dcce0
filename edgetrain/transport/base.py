"""What an agent or coordinator needs of a network. MQTT and the in-memory hub both fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from edgetrain.errors import TransportError
from edgetrain.transport.traffic import Traffic
from edgetrain.wire.topics import Channel

log = logging.getLogger(__name__)

DEFAULT_WINDOW_BYTES: Final = 16 << 20

# Below the 1 MiB that our brokers take, topic included.
DEFAULT_MAX_PAYLOAD_BYTES: Final = (1 << 20) - 4096

Payload = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Inbound:
    """A message that arrived; `source` is the name of its sender."""

    source: str
    channel: Channel
    payload: bytes


@dataclass(frozen=True, slots=True)
class Presence:
    """What a device says of itself for as long as it is there; empty means gone."""

    device: str
    payload: bytes

    @property
    def gone(self) -> bool:
        return not self.payload


Receive = Callable[[Inbound], None]
OnPresence = Callable[[Presence], None]


class Transport(Protocol):
    """One named party's way to all others.

    Messages from one party to another keep their order within a channel. CONTROL messages
    survive a reconnection, and may then come twice. DATA messages that are under way when a
    connection breaks are lost, and FLOW messages too: whoever needs them asks again.

    `receive` and `on_presence` run on the transport's own thread: they must only enqueue.
    To compute, to wait or to send there would stop everything that arrives.
    """

    @property
    def name(self) -> str: ...

    @property
    def traffic(self) -> Traffic: ...

    @property
    def payload_limit_bytes(self) -> int:
        """The largest payload that arrives, as far as is known; once open."""
        ...

    def open(
        self,
        receive: Receive,
        *,
        on_presence: OnPresence | None = None,
        announce: bytes | None = None,
    ) -> None:
        """Connect, subscribe, and only then announce.

        Args:
            receive: gets every message to this name.
            on_presence: gets the presence of every device, at once for those already there.
            announce: this party's own presence, kept by the broker and replaced by an empty
                one when the connection is lost or closed.

        Raises:
            TransportError: there is no broker, it refuses us, or this was opened before.
        """
        ...

    def send(self, to: str, channel: Channel, payload: Payload) -> None:
        """Hand a message over, without waiting for its receiver.

        DATA waits while a window of earlier bytes has not left the process.

        Raises:
            TransportError: not open, the connection is lost for good, or the payload is
                over the limit.
        """
        ...

    def withdraw(self) -> None:
        """Take the presence back but stay connected."""
        ...

    def close(self) -> None:
        """Withdraw, let what was sent leave, and disconnect. Safe to call twice."""
        ...

    def kill(self) -> None:
        """End as a crash does, without a goodbye: how a simulated device dies."""
        ...


_Item = TypeVar("_Item", Inbound, Presence)


def deliver(callback: Callable[[_Item], None], item: _Item) -> None:
    """Call back; an error there is logged and must not end the thread that delivers."""
    try:
        callback(item)
    except Exception:
        log.exception("%s: the receiver failed on a message", callback)


def check_payload(payload: Payload, limit_bytes: int) -> int:
    """The payload's size in bytes.

    Raises:
        TransportError: it is over the limit. A broker would cut the connection instead, and
            the client would send it again for ever.
    """
    nbytes = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    if nbytes > limit_bytes:
        raise TransportError(
            f"message of {nbytes} B is over the transport's limit of {limit_bytes} B:"
            " send it as frames of smaller chunks, or raise max_payload_bytes here and the"
            " broker's own limit (mosquitto: max_packet_size and message_size_limit;"
            " iotcore: max_payload_size)"
        )
    return nbytes
