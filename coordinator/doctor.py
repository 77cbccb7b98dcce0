"""Examines a broker from the place of one party: what is right, and what to change."""

from __future__ import annotations

import socket
import ssl
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Final

from coordinator.certificates import expiry
from coordinator.doctor_rights import rights
from coordinator.figures import bytes_text, seconds_text
from coordinator.finding import Finding, Verdict
from edgetrain.errors import EdgeTrainError, TransportError
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.base import Inbound
from edgetrain.transport.limits import BrokerLimits, broker_limits
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.transport.tls import TlsFiles, client_context, is_local
from edgetrain.wire.frame import DEFAULT_CHUNK_BYTES
from edgetrain.wire.topics import Channel, inbox

_EXPIRY_DAYS: Final = 30
_HELD_BACK_S: Final = 0.02  # Nagle's algorithm with delayed acknowledgements: 40 ms
_HEAD_BYTES: Final = 1024  # of a frame and its topic, at most
_BODY_BYTES: Final = 128 << 10
_BODIES: Final = 64
_IN_FLIGHT: Final = 8
_WAIT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Party:
    """Who examines, and with what credentials."""

    url: str
    name: str
    settings: MqttSettings
    password: str | None = None

    @property
    def address(self) -> BrokerAddress:
        address = BrokerAddress.parse(self.url)
        return replace(address, password=address.password or self.password)

    def transport(self) -> MqttTransport:
        address = self.address
        return MqttTransport(
            self.url, self.name, password=address.password, settings=self.settings
        )


def examine(party: Party) -> Iterator[Finding]:
    """What was found, as it is found; it ends early where nothing more can be.

    Raises:
        ConfigError: the party's own files cannot be used.
    """
    reached = _reach(party)
    yield reached
    if reached.verdict is Verdict.CHANGE:
        return
    for finding in _tls(party):
        yield finding
        if finding.stops:
            return
    entry = _entry(party)
    yield entry
    if entry.stops:
        return
    yield _nobody(party)
    yield from rights(party.address, party.name, party.settings)
    yield from _limits(party)
    yield _speed(party)


def _reach(party: Party) -> Finding:
    address = party.address
    start_s = time.perf_counter()
    try:
        with socket.create_connection((address.host, address.port), _WAIT_S):
            took = seconds_text(time.perf_counter() - start_s)
    except OSError as error:
        advice = "check host, port and firewall, and that the broker runs"
        return Finding("reachable", Verdict.CHANGE, f"{address}: {error}", advice)
    return Finding("reachable", Verdict.GOOD, f"{address} in {took}")


def _tls(party: Party) -> Iterator[Finding]:
    address = party.address
    if not address.tls:
        if is_local(address.host):
            yield Finding("TLS", Verdict.NOTE, "none, and none needed on one machine")
        else:
            advice = "use mqtts://: `edgetrain fleet init` makes all that it needs"
            found = "none: anyone on the way can read"
            stops = not party.settings.insecure
            yield Finding("TLS", Verdict.CHANGE, found, advice, stops=stops)
        return
    context = client_context(party.settings.tls)
    try:
        with (
            socket.create_connection((address.host, address.port), _WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as wrapped,
        ):
            version, certificate = wrapped.version(), wrapped.getpeercert() or {}
    except OSError as error:
        advice = (
            "give the authority that signed the broker's certificate (ca_file), and a host"
            " name that the certificate states (fleet init --host)"
        )
        yield Finding("TLS", Verdict.CHANGE, str(error), advice, stops=True)
        return
    yield Finding("TLS", Verdict.GOOD, f"{version}, certificate and host name match")
    ends_s = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    ends = datetime.fromtimestamp(ends_s, UTC)
    yield _lasts("broker's certificate", ends, "fleet init --replace")
    if party.settings.tls.cert_file is not None:
        own = expiry(party.settings.tls.cert_file.read_bytes())
        yield _lasts("our certificate", own, "fleet revoke, then fleet add")


def _lasts(what: str, ends: datetime, advice: str) -> Finding:
    days = (ends - datetime.now(UTC)).days
    verdict = Verdict.GOOD if days >= _EXPIRY_DAYS else Verdict.CHANGE
    found = f"until {ends:%Y-%m-%d}, {days} days"
    return Finding(what, verdict, found, "" if verdict is Verdict.GOOD else advice)


def _entry(party: Party) -> Finding:
    """Whether it lets us in, under our name."""
    transport = party.transport()
    try:
        transport.open(lambda _: None)
    except TransportError as error:
        return Finding("identity", Verdict.CHANGE, str(error), "see there", stops=True)
    transport.close()
    return Finding("identity", Verdict.GOOD, f"lets {party.name} in")


def _nobody(party: Party) -> Finding:
    """Whether it lets in someone without password or certificate; it must not."""
    settings = replace(party.settings, tls=TlsFiles(party.settings.tls.ca_file))
    url = str(party.address)
    try:
        stranger = MqttTransport(url, party.name, settings=settings)
        stranger.open(lambda _: None)
    except EdgeTrainError:
        return Finding("strangers", Verdict.GOOD, "refused")
    stranger.close()
    advice = (
        "mosquitto: allow_anonymous false, and require_certificate true or a password_file"
    )
    return Finding("strangers", Verdict.CHANGE, "let in without proof of identity", advice)


def _limits(party: Party) -> Iterator[Finding]:
    namespace = party.settings.namespace
    topic = inbox(namespace, party.name, party.name, Channel.CONTROL)
    try:
        limits = broker_limits(party.address, party.settings, topic)
    except TransportError as error:
        advice = "let every party write to and read from its own inbox"
        yield Finding("limits", Verdict.CHANGE, str(error), advice)
        return
    yield _packet_size(limits)
    took = seconds_text(limits.round_trip_s)
    if limits.round_trip_s < _HELD_BACK_S:
        yield Finding("small messages", Verdict.GOOD, f"{took} to and fro")
    else:
        advice = "mosquitto: set_tcp_nodelay true; or the network itself is slow"
        yield Finding("small messages", Verdict.CHANGE, f"{took} to and fro", advice)


def _packet_size(limits: BrokerLimits) -> Finding:
    stated = limits.max_packet_bytes
    if not limits.mqtt5:
        found = "not stated: it does not speak MQTT 5"
        return Finding("largest packet", Verdict.NOTE, found)
    if stated is None:
        return Finding("largest packet", Verdict.GOOD, "no limit stated")
    if stated >= DEFAULT_CHUNK_BYTES + _HEAD_BYTES:
        return Finding("largest packet", Verdict.GOOD, bytes_text(stated))
    advice = "mosquitto: max_packet_size 1048576"
    return Finding("largest packet", Verdict.CHANGE, bytes_text(stated), advice)


def _speed(party: Party) -> Finding:
    """Send tensors' worth of bytes to ourselves, a few in flight, as a pipeline does."""
    returned: SimpleQueue[Inbound] = SimpleQueue()
    transport = party.transport()
    try:
        transport.open(returned.put)
        trips = [_trip(transport, returned) for _ in range(5)]
        start_s = time.perf_counter()
        flying = threading.Semaphore(_IN_FLIGHT)
        for count in range(_BODIES):
            if count >= _IN_FLIGHT:
                returned.get(timeout=_WAIT_S)
                flying.release()
            flying.acquire()
            transport.send(party.name, Channel.DATA, bytes(_BODY_BYTES))
        for _ in range(_IN_FLIGHT):
            returned.get(timeout=_WAIT_S)
        seconds = time.perf_counter() - start_s
    except (TransportError, Empty) as error:
        what = str(error) or "messages to ourselves did not come back"
        advice = "raise max_queued_messages, and max_packet_size to 1048576"
        return Finding("throughput", Verdict.CHANGE, what, advice)
    finally:
        transport.close()
    rate = bytes_text(round(_BODIES * _BODY_BYTES / seconds))
    trip = seconds_text(statistics.median(trips))
    found = f"{rate}/s in messages of {bytes_text(_BODY_BYTES)}; {trip} to and fro for one"
    return Finding("throughput", Verdict.GOOD, found)


def _trip(transport: MqttTransport, returned: SimpleQueue[Inbound]) -> float:
    start_s = time.perf_counter()
    transport.send(transport.name, Channel.DATA, bytes(_BODY_BYTES))
    returned.get(timeout=_WAIT_S)
    return time.perf_counter() - start_s
