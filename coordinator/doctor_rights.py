"""Whether a broker's access list holds: tries what must be refused, sees what comes.

Brokers of MQTT 3.1.1 do not say that they refused a message, and grant subscriptions that
they then do not serve. So each try is judged by what arrives, once a message that was sent
after it has arrived.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import Final

from coordinator.finding import Finding, Verdict
from edgetrain.errors import TransportError
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.link import Link, LinkSpec, MqttSettings
from edgetrain.wire.topics import Channel, inbox, inbox_filter, presence

_WAIT_S: Final = 5.0
_GRACE_S: Final = 0.3
_ADVICE: Final = (
    "an access list as in docs/broker.md (mosquitto: acl_file), or `edgetrain fleet init`"
)


class _Ear:
    """A connection that notes which of our messages reach it."""

    def __init__(
        self, address: BrokerAddress, settings: MqttSettings, filters: tuple[str, ...]
    ) -> None:
        self._heard: set[tuple[str, bytes]] = set()
        self._news = threading.Condition()
        client_id = f"edgetrain-doctor-{secrets.token_hex(16)}"
        spec = LinkSpec(client_id, filters, 1, None, self._hear, lambda: None)
        self.link = Link(spec, address, settings)

    def hears(self, topic: str, payload: bytes, timeout_s: float) -> bool:
        with self._news:
            return self._news.wait_for(lambda: (topic, payload) in self._heard, timeout_s)

    def _hear(self, topic: str, payload: bytes) -> None:
        with self._news:
            self._heard.add((topic, payload))
            self._news.notify_all()


def rights(address: BrokerAddress, me: str, settings: MqttSettings) -> Iterator[Finding]:
    """Try to speak as another, to read another's inbox, and to read everything."""
    namespace = settings.namespace
    other = f"doctor-{secrets.token_hex(4)}"
    forged = inbox(namespace, me, other, Channel.CONTROL)
    foreign = inbox(namespace, other, me, Channel.CONTROL)
    gone = presence(namespace, other)
    mine = inbox_filter(namespace, me, Channel.CONTROL)
    theirs = inbox_filter(namespace, other, Channel.CONTROL)
    yield _try("speaking as another", (address, settings), mine, forged, me)
    yield _try("presence of another", (address, settings), gone, gone, me)
    yield _try("reading another's inbox", (address, settings), theirs, foreign, me)
    yield _try("reading everything", (address, settings), "#", foreign, me)


def _try(
    what: str,
    place: tuple[BrokerAddress, MqttSettings],
    subscription: str,
    topic: str,
    me: str,
) -> Finding:
    address, settings = place
    own = inbox(settings.namespace, me, me, Channel.CONTROL)
    token = secrets.token_hex(8).encode()
    speaker = _Ear(
        address, settings, (inbox_filter(settings.namespace, me, Channel.CONTROL),)
    )
    ear = _Ear(address, settings, (subscription,))
    with contextlib.ExitStack() as stack:
        try:
            speaker.link.connect()
            stack.callback(speaker.link.close, "done")
            ear.link.connect()
            stack.callback(ear.link.close, "done")
        except TransportError:
            return Finding(what, Verdict.GOOD, "refused: the connection was closed")
        speaker.link.publish(topic, token, qos=1)
        speaker.link.publish(own, token, qos=1)
        if not speaker.hears(own, token, _WAIT_S):
            found = "could not be tried: our own inbox returns nothing"
            return Finding(what, Verdict.CHANGE, found, _ADVICE)
        if ear.hears(topic, token, _GRACE_S):
            return Finding(what, Verdict.CHANGE, "allowed", _ADVICE)
    return Finding(what, Verdict.GOOD, "refused")
