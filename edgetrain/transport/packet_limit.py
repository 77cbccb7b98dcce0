"""The largest packet that a broker takes, where it speaks MQTT 5."""

from __future__ import annotations

import secrets
import threading
from typing import Final

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.tls import client_context

ANSWER_TIMEOUT_S: Final = 1.0

# Beside a frame's body: its header, the packet's and the topic.
FRAME_OVERHEAD_BYTES: Final = 1024


class PacketLimit:
    """Asks a broker for its largest packet, on a thread of its own.

    MQTT 3.1.1, which the links speak, has no words for it, and a broker that only speaks
    that does not answer.
    """

    def __init__(self, address: BrokerAddress, settings: MqttSettings) -> None:
        self._address = address
        self._settings = settings
        self._answered = threading.Event()
        self._bytes: int | None = None
        self._thread = threading.Thread(target=self._ask, name="packet-limit", daemon=True)
        self._thread.start()

    def wait(self) -> int | None:
        """The largest packet in bytes; None: the broker does not say."""
        self._thread.join(self._settings.connect_timeout_s + ANSWER_TIMEOUT_S)
        return self._bytes

    def _ask(self) -> None:
        client_id = f"{self._settings.namespace}-limit-{secrets.token_hex(4)}"
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=paho.MQTTv5,
            reconnect_on_failure=False,
        )
        client.connect_timeout = self._settings.connect_timeout_s
        client.username_pw_set(self._address.username, self._address.password)
        if self._address.tls:
            client.tls_set_context(client_context(self._settings.tls))
        client.on_connect = self._on_connect
        try:
            client.connect(self._address.host, self._address.port)
        except OSError:
            return  # the links say so, and better
        client.loop_start()
        self._answered.wait(ANSWER_TIMEOUT_S)
        client.disconnect()
        client.loop_stop()

    def _on_connect(
        self,
        _client: paho.Client,
        _userdata: object,
        _flags: paho.ConnectFlags,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        if not reason.is_failure:
            self._bytes = getattr(properties, "MaximumPacketSize", None)
        self._answered.set()
