"""What a broker says of its limits, and whether it holds small packets back.

A stock client of MQTT 5, where limits are announced, else of 3.1.1. It is not `Client`,
which acknowledges so promptly that a broker without TCP_NODELAY would not show.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Final

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edgetrain.errors import TransportError
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.paho_client import send_at_once
from edgetrain.transport.tls import client_context

_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)  # Linux only
_ROUNDS: Final = 7
_BURST: Final = 3


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """What was found.

    Attributes:
        mqtt5: it speaks MQTT 5.
        max_packet_bytes: it takes no larger ones; None: it does not say.
        receive_maximum: unacknowledged messages it takes; None: it does not say.
        round_trip_s: of a few small messages at QoS 0 to ourselves, median.
    """

    mqtt5: bool
    max_packet_bytes: int | None
    receive_maximum: int | None
    round_trip_s: float


def broker_limits(
    address: BrokerAddress, settings: MqttSettings, topic: str
) -> BrokerLimits:
    """Ask the broker, and send small messages to a topic that we may write and read.

    Raises:
        TransportError: it does not let us in, or the messages do not come back.
    """
    with contextlib.suppress(TransportError):
        return _Visit(address, settings, paho.MQTTv5).limits(topic)
    return _Visit(address, settings, paho.MQTTv311).limits(topic)


class _Visit:
    """One connection, from which all is read off."""

    def __init__(
        self, address: BrokerAddress, settings: MqttSettings, protocol: MQTTProtocolVersion
    ) -> None:
        self._address, self._settings = address, settings
        self._timeout_s = settings.connect_timeout_s
        self._protocol = protocol
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2,
            f"edgetrain-doctor-{secrets.token_hex(16)}",
            protocol=protocol,
            reconnect_on_failure=False,
        )
        self._connected, self._subscribed = threading.Event(), threading.Event()
        self._arrived = threading.Semaphore(0)
        self._stated: dict[str, int] = {}
        self._client.username_pw_set(address.username, address.password)
        if address.tls:
            self._client.tls_set_context(client_context(settings.tls))
        self._client.on_socket_open = send_at_once
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.on_message = lambda *_: self._arrived.release()

    def limits(self, topic: str) -> BrokerLimits:
        try:
            self._client.connect(self._address.host, self._address.port, 10)
        except OSError as error:
            raise TransportError(f"no broker at {self._address}: {error}") from error
        self._client.loop_start()
        try:
            self._await(self._connected, "did not let us in")
            self._client.subscribe(topic, qos=0)
            self._await(self._subscribed, "did not answer a subscription")
            round_trip_s = statistics.median(self._round(topic) for _ in range(_ROUNDS))
        finally:
            self._client.disconnect()
            self._client.loop_stop()
        return BrokerLimits(
            self._protocol == paho.MQTTv5,
            self._stated.get("MaximumPacketSize"),
            self._stated.get("ReceiveMaximum"),
            round_trip_s,
        )

    def _round(self, topic: str) -> float:
        """Seconds that a burst takes to come back.

        A broker that does not send at once holds the second packet back until we
        acknowledge the first, and that we put off: nothing goes back at QoS 0.
        """
        _acknowledge_late(self._client.socket())
        start_s = time.perf_counter()
        for _ in range(_BURST):
            self._client.publish(topic, b"edgetrain doctor", qos=0)
        for _ in range(_BURST):
            if not self._arrived.acquire(timeout=self._timeout_s):
                raise TransportError(
                    f"the broker at {self._address} did not return our own messages"
                )
        return time.perf_counter() - start_s

    def _await(self, event: threading.Event, what: str) -> None:
        if not event.wait(self._timeout_s):
            raise TransportError(f"the broker at {self._address} {what}")

    def _on_connect(
        self,
        _client: paho.Client,
        _userdata: object,
        _flags: paho.ConnectFlags,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        if reason.is_failure:
            return
        if properties is not None:
            for key in ("MaximumPacketSize", "ReceiveMaximum"):
                value = getattr(properties, key, None)
                if isinstance(value, int):
                    self._stated[key] = value
        self._connected.set()


def _acknowledge_late(sock: object) -> None:
    """Linux acknowledges at once while it takes a connection for a one-way one."""
    if _QUICKACK is not None and isinstance(sock, socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 0)
