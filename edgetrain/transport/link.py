"""One MQTT connection: made with clear errors, kept up, and known when it is not."""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paho.mqtt import client as paho
from paho.mqtt.enums import MQTTErrorCode
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edgetrain.errors import ConfigError, TransportError
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.base import DEFAULT_MAX_PAYLOAD_BYTES, DEFAULT_WINDOW_BYTES
from edgetrain.transport.flow import SendWindow
from edgetrain.transport.paho_client import Client
from edgetrain.wire.topics import NAMESPACE

log = logging.getLogger(__name__)

_END_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class MqttSettings:
    """How to use a broker.

    Attributes:
        namespace: first level of every topic; runs in different ones never meet.
        keepalive_s: a device that hangs is reported gone after 1.3 to 1.9 times this.
        lost_after_s: how long a broken connection may take to come back.
        ca_file: certificate authorities for ``mqtts://``; the system's when None.
    """

    namespace: str = NAMESPACE
    keepalive_s: int = 10
    connect_timeout_s: float = 5.0
    lost_after_s: float = 60.0
    window_bytes: int = DEFAULT_WINDOW_BYTES
    max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
    ca_file: Path | None = None


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What a connection is for.

    Attributes:
        filters: the topics it receives, with quality of service `qos`.
        will: the retained topic that the broker empties when the connection breaks.
        deliver: called with topic and payload, on the network thread.
        ready: called there when the filters are in place, so also after a reconnection.
    """

    client_id: str
    filters: tuple[str, ...]
    qos: int
    will: str | None
    deliver: Callable[[str, bytes], None]
    ready: Callable[[], None]


class Link:
    """A connection that restores itself and its subscriptions.

    With QoS 0, `window` holds senders up while the connection is down; with QoS 1 what is
    sent then is kept and goes later.
    """

    def __init__(
        self, spec: LinkSpec, address: BrokerAddress, settings: MqttSettings
    ) -> None:
        self.window = SendWindow(settings.window_bytes)
        self._spec = spec
        self._address = address
        self._settings = settings
        self._client = Client(spec.client_id, self.window)
        self._settled = threading.Event()
        self._refusal = ""
        self._down_since_s: float | None = None
        self._last: paho.MQTTMessageInfo | None = None
        self._configure()

    def connect(self) -> None:
        """Connect and subscribe.

        Raises:
            TransportError: no broker, refused, or no answer in time.
        """
        address, settings = self._address, self._settings
        try:
            self._client.connect(address.host, address.port, settings.keepalive_s)
        except OSError as error:
            raise TransportError(self._unreachable(error)) from error
        self._client.loop_start()
        if not self._settled.wait(settings.connect_timeout_s):
            self._refuse(
                f"did not answer within {settings.connect_timeout_s:g} s. Check that it is"
                " an MQTT broker, and that its port expects mqtt:// or mqtts:// as given"
            )
        if self._refusal:
            self.close("could not be opened")
            raise TransportError(f"the broker at {address} {self._refusal}")

    def publish(
        self, topic: str, payload: bytes | bytearray, *, qos: int, retain: bool = False
    ) -> None:
        """Hand a message to the network thread.

        A QoS 0 message handed over at the moment the connection breaks is lost, like those
        already in the kernel's buffers.

        Raises:
            TransportError: the client does not take it.
        """
        if qos == 0 and not retain:
            self._client.send(topic, payload)
            return
        info = self._client.publish(topic, payload, qos=qos, retain=retain)
        if info.rc not in (MQTTErrorCode.MQTT_ERR_SUCCESS, MQTTErrorCode.MQTT_ERR_NO_CONN):
            raise TransportError(f"cannot send to {self._address}: {info.rc.name}")
        self._last = info

    def close(self, reason: str) -> None:
        """Let what was sent leave, then disconnect; later senders fail with `reason`."""
        if self._client.is_connected():
            if self._last is not None:
                with contextlib.suppress(RuntimeError):
                    self._last.wait_for_publish(_END_TIMEOUT_S)
            self.window.drain(_END_TIMEOUT_S)
        self.window.close(reason)
        self._client.on_disconnect = None
        self._client.end(_END_TIMEOUT_S)

    def kill(self, reason: str) -> None:
        """Drop the connection without a goodbye, for good."""
        self.window.close(reason)
        self._client.on_disconnect = None
        self._client.kill(_END_TIMEOUT_S)

    def _configure(self) -> None:
        client, address = self._client, self._address
        client.connect_timeout = self._settings.connect_timeout_s
        client.username_pw_set(address.username, address.password)
        if address.tls:
            client.tls_set_context(tls_context(self._settings.ca_file))
        if self._spec.will is not None:
            client.will_set(self._spec.will, b"", qos=1, retain=True)
        client.on_connect = self._on_connect
        client.on_connect_fail = self._on_connect_fail
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = self._on_subscribe
        client.on_message = self._on_message

    def _unreachable(self, error: OSError) -> str:
        if isinstance(error, ssl.SSLError):
            return (
                f"no TLS connection to the broker at {self._address}: {error}. Give the CA"
                " file that its certificate was signed with, and the host name that the"
                " certificate states"
            )
        return (
            f"no broker at {self._address}: {error}. Check host and port, that the broker"
            " runs and listens on that address, and that no firewall is between"
        )

    def _on_connect(
        self,
        client: paho.Client,
        _userdata: object,
        _flags: paho.ConnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if reason.is_failure:
            self._refuse(
                f"refuses us: {str(reason).lower()}. Check the user name and password in"
                " its URL, mqtt://user:password@host"
            )
            return
        self.window.resume()
        client.subscribe([(name, self._spec.qos) for name in self._spec.filters])

    def _on_subscribe(
        self,
        _client: paho.Client,
        _userdata: object,
        _mid: int,
        reasons: list[ReasonCode],
        _properties: Properties | None,
    ) -> None:
        if any(reason.is_failure for reason in reasons):
            filters = ", ".join(self._spec.filters)
            self._refuse(f"does not let us read {filters}. Check its access control list")
            return
        if self._down_since_s is not None:
            log.warning("connected again to the broker at %s", self._address)
            self._down_since_s = None
        self._client.persist(True)
        self._spec.ready()
        self._settled.set()

    def _on_disconnect(
        self,
        _client: paho.Client,
        _userdata: object,
        _flags: paho.DisconnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if reason.is_failure:
            self._refuse(
                "closed the connection without an answer. Check the user name and password"
                " in its URL, mqtt://user:password@host, and that it speaks MQTT there"
            )

    def _on_connect_fail(self, _client: paho.Client, _userdata: object) -> None:
        self._refuse("cannot be reached")

    def _on_message(
        self, _client: paho.Client, _userdata: object, message: paho.MQTTMessage
    ) -> None:
        self._spec.deliver(message.topic, bytes(message.payload))

    def _refuse(self, why: str) -> None:
        """Note that we are not connected: `connect` fails, or an outage starts or lasts."""
        if not self._settled.is_set():
            self._refusal = self._refusal or why
            self._settled.set()
        if self._refusal:
            return  # `connect` reports it
        now_s = time.monotonic()
        if self._down_since_s is None:
            log.warning("lost the broker at %s; connecting again", self._address)
            self._down_since_s = now_s
            if self._spec.qos == 0:
                self.window.pause()
        if now_s - self._down_since_s >= self._settings.lost_after_s:
            self.window.close(
                f"the broker at {self._address} {why}; the connection has been down for"
                f" {self._settings.lost_after_s:g} s. Start the broker again, then the run"
            )
            self._client.persist(False)


def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """What a client checks a broker by.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(
            f"cannot read certificate authorities from {ca_file}: {error}. Give a PEM file"
        ) from error
