"""The transport over an MQTT broker: one connection for control, one for data."""

from __future__ import annotations

import dataclasses
import logging
import secrets

from edgetrain.errors import EdgeTrainError, TransportError, WireError
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.base import (
    Inbound,
    OnPresence,
    Payload,
    Presence,
    Receive,
    check_payload,
    deliver,
)
from edgetrain.transport.link import Link, LinkSpec, MqttSettings
from edgetrain.transport.packet_limit import FRAME_OVERHEAD_BYTES, PacketLimit
from edgetrain.transport.tls import check_plain
from edgetrain.transport.traffic import Traffic
from edgetrain.wire import topics
from edgetrain.wire.topics import Channel, check_name

log = logging.getLogger(__name__)

_QOS = {Channel.CONTROL: 1, Channel.DATA: 0, Channel.FLOW: 0}

# FLOW shares a connection with CONTROL
_LINK = {channel: channel for channel in Channel} | {Channel.FLOW: Channel.CONTROL}


class MqttTransport:
    """Implements `Transport`.

    The client ids end in 128 random bits. So a second party of the same name does not throw
    the first off the broker, and nobody can who has not read the broker's own log: brokers
    end a connection when another comes under its id, whoever that is.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        username: str | None = None,
        password: str | None = None,
        settings: MqttSettings | None = None,
    ) -> None:
        """Prepare; a user or password given here takes the place of the URL's.

        Raises:
            ConfigError: the URL or the name cannot be used, or it is another machine's,
                without TLS.
        """
        self._settings = settings or MqttSettings()
        self.name = check_name(name, allow_coordinator=True)
        self._namespace = check_name(self._settings.namespace, allow_coordinator=True)
        address = BrokerAddress.parse(url)
        self._address = dataclasses.replace(
            address,
            username=address.username if username is None else username,
            password=address.password if password is None else password,
        )
        check_plain(self._address, insecure=self._settings.insecure)
        self._presence_topic = topics.presence(self._namespace, name)
        self._links: dict[Channel, Link] = {}
        self.traffic = Traffic()
        self._receive: Receive | None = None
        self._on_presence: OnPresence | None = None
        self._announce: bytes | None = None
        self._limit: PacketLimit | None = None

    @property
    def payload_limit_bytes(self) -> int:
        """See `Transport.payload_limit_bytes`; as the broker says, if that was asked."""
        said_bytes = None if self._limit is None else self._limit.wait()
        known_bytes = self._settings.max_payload_bytes
        if said_bytes is None:
            return known_bytes
        return min(known_bytes, said_bytes - FRAME_OVERHEAD_BYTES)

    def open(
        self,
        receive: Receive,
        *,
        on_presence: OnPresence | None = None,
        announce: bytes | None = None,
    ) -> None:
        """See `Transport.open`. Data first: an announced party can already be reached."""
        if self._links:
            raise TransportError(f"{self.name}: a transport opens once; make another")
        self._receive, self._on_presence, self._announce = receive, on_presence, announce
        session = secrets.token_hex(16)
        if on_presence is not None:  # who watches the devices also says how they send
            self._limit = PacketLimit(self._address, self._settings)
        try:
            for channel in (Channel.DATA, Channel.CONTROL):
                spec = self._spec(channel, session)
                self._links[channel] = Link(spec, self._address, self._settings)
                self._links[channel].connect()
        except EdgeTrainError:
            self._close_links("could not be opened")
            self._links.clear()
            self._announce = None
            raise

    def send(self, to: str, channel: Channel, payload: Payload) -> None:
        """See `Transport.send`."""
        nbytes = check_payload(payload, self._settings.max_payload_bytes)
        link = self._links.get(_LINK[channel])
        if link is None:
            raise TransportError(f"{self.name}: the transport is not open")
        link.window.wait()
        topic = topics.inbox(self._namespace, to, self.name, channel)
        body = bytes(payload) if isinstance(payload, memoryview) else payload
        link.publish(topic, body, qos=_QOS[channel])
        self.traffic.sent_bytes[channel] += nbytes

    def withdraw(self) -> None:
        """See `Transport.withdraw`."""
        if self._announce is None:
            return
        self._announce = None
        link = self._links[Channel.CONTROL]
        link.publish(self._presence_topic, b"", qos=1, retain=True)

    def close(self) -> None:
        """See `Transport.close`."""
        self.withdraw()
        self._close_links("is closed")

    def kill(self) -> None:
        """See `Transport.kill`."""
        self._announce = None
        for link in self._links.values():
            link.kill(f"{self.name}: the transport was killed")

    def _close_links(self, why: str) -> None:
        for link in self._links.values():
            link.close(f"{self.name}: the transport {why}")

    def _spec(self, channel: Channel, session: str) -> LinkSpec:
        """Only the control link, which announces, carries a will."""
        client_id = f"{self._namespace}-{self.name}-{channel}-{session}"
        mine = topics.inbox_filter(self._namespace, self.name, channel)
        qos = _QOS[channel]
        if channel is Channel.DATA:
            return LinkSpec(client_id, (mine,), qos, None, self._on_inbound, lambda: None)
        flow = topics.inbox_filter(self._namespace, self.name, Channel.FLOW)
        filters: tuple[str, ...] = (mine, flow)
        if self._on_presence is not None:
            filters = (*filters, topics.presence_filter(self._namespace))
        return LinkSpec(
            client_id, filters, qos, self._presence_topic, self._on_control, self._publish
        )

    def _publish(self) -> None:
        """Announce: at first, and when the broker has published our will meanwhile."""
        if self._announce is not None:
            link = self._links[Channel.CONTROL]
            link.publish(self._presence_topic, self._announce, qos=1, retain=True)

    def _on_control(self, topic: str, payload: bytes) -> None:
        if not topic.startswith(f"{self._namespace}/up/"):
            self._on_inbound(topic, payload)
            return
        try:
            presence = Presence(topics.parse_presence(topic), payload)
        except WireError as error:
            log.warning("%s: dropped a message: %s", self.name, error)
            return
        if self._on_presence is not None:
            deliver(self._on_presence, presence)

    def _on_inbound(self, topic: str, payload: bytes) -> None:
        try:
            _, source, channel = topics.parse_inbox(topic)
        except WireError as error:
            log.warning("%s: dropped a message: %s", self.name, error)
            return
        self.traffic.received_bytes[channel] += len(payload)
        if self._receive is not None:
            deliver(self._receive, Inbound(source, channel, payload))
