"""What a mosquitto made by `edgetrain fleet init` refuses, each by someone who tries."""

from __future__ import annotations

import secrets
import shutil
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from party import Party
from secure_fleet import HOST, SecureFleet, now, secure_fleet

from coordinator.certificates import Credentials, issue_device, make_authority
from coordinator.provision import Request, add_device, init_fleet, revoke_device
from edgetrain.errors import TransportError
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.link import Link, LinkSpec, MqttSettings
from edgetrain.transport.tls import TlsFiles
from edgetrain.wire.topics import COORDINATOR, Channel, inbox, presence

pytestmark = pytest.mark.skipif(
    shutil.which("mosquitto") is None, reason="no mosquitto on PATH"
)
PI, MALLORY = "pi", "mallory"  # mallory is a device of the fleet too, and misbehaves
NS = "edgetrain"


@pytest.fixture
def fleet(tmp_path):
    with secure_fleet(tmp_path / "fleet", PI, MALLORY) as running:
        yield running


class Rogue:
    """A connection with someone's certificate and any client id, filters and topics."""

    def __init__(self, fleet: SecureFleet, name: str, client_id: str, *filters: str):
        self.heard: list[tuple[str, bytes]] = []
        self.news = threading.Condition()
        settings = MqttSettings(tls=fleet.files(name))
        spec = LinkSpec(client_id, filters, 1, None, self._hear, lambda: None)
        self.link = Link(spec, BrokerAddress.parse(fleet.url), settings)
        self.link.connect()

    def _hear(self, topic: str, payload: bytes) -> None:
        with self.news:
            self.heard.append((topic, payload))
            self.news.notify_all()

    def say(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self.link.publish(topic, payload, qos=1, retain=retain)


def write(folder: Path, pair: Credentials, authority: bytes) -> TlsFiles:
    folder.mkdir()
    files = TlsFiles(folder / "ca.crt", folder / "it.crt", folder / "it.key")
    files.ca_file.write_bytes(authority)
    files.cert_file.write_bytes(pair.certificate)
    files.key_file.touch(mode=0o600)
    files.key_file.write_bytes(pair.key)
    return files


def authority(fleet: SecureFleet) -> Credentials:
    place = fleet.folder / "ca"
    return Credentials((place / "ca.crt").read_bytes(), (place / "ca.key").read_bytes())


def refused(fleet: SecureFleet, name: str, files: TlsFiles) -> None:
    with pytest.raises(TransportError, match="certificate"):
        fleet.transport(name, files).open(lambda _: None)


def test_parties_of_the_fleet_meet(fleet):
    coordinator = Party(fleet.transport(COORDINATOR)).open(watch=True)
    pi = Party(fleet.transport(PI)).open(b"hello")
    assert coordinator.takes_presence() == (PI, b"hello")
    for channel in Channel:
        coordinator.transport.send(PI, channel, b"to")
        assert pi.take().payload == b"to"
        pi.transport.send(COORDINATOR, channel, b"fro")
        assert coordinator.take().payload == b"fro"
    pi.transport.close()
    assert coordinator.takes_presence() == (PI, b"")
    coordinator.transport.close()


def test_no_certificate_is_refused(fleet):
    refused(fleet, PI, TlsFiles(fleet.files(PI).ca_file))


def test_a_certificate_of_another_authority_is_refused(fleet, tmp_path):
    other = make_authority("edgetrain fleet", now())
    trusted = fleet.files(PI).ca_file.read_bytes()
    refused(fleet, PI, write(tmp_path / "a", issue_device(other, PI, now()), trusted))


def test_a_broker_of_another_authority_is_refused(fleet, tmp_path):
    other = make_authority("edgetrain fleet", now())
    own = issue_device(authority(fleet), PI, now())
    files = write(tmp_path / "a", own, other.certificate)
    with pytest.raises(TransportError, match="no TLS connection"):
        fleet.transport(PI, files).open(lambda _: None)


def test_a_certificate_signed_by_a_device_is_refused(fleet, tmp_path):
    place = fleet.folder / "devices" / MALLORY
    mallory = Credentials(
        (place / "device.crt").read_bytes(), (place / "device.key").read_bytes()
    )
    forged = issue_device(mallory, PI, now())
    chain = Credentials(forged.certificate + mallory.certificate, forged.key)
    trusted = fleet.files(PI).ca_file.read_bytes()
    refused(fleet, PI, write(tmp_path / "a", chain, trusted))


def test_an_expired_certificate_is_refused(fleet, tmp_path):
    old = issue_device(authority(fleet), PI, now() - timedelta(days=30), days=29)
    trusted = fleet.files(PI).ca_file.read_bytes()
    refused(fleet, PI, write(tmp_path / "a", old, trusted))


def test_a_device_does_not_pass_for_the_broker(fleet):
    """Even with the configuration of the fleet's broker, on the fleet's own port."""
    place = fleet.folder / "devices" / MALLORY
    for suffix in ("crt", "key"):
        shutil.copy(
            place / f"device.{suffix}", fleet.folder / "broker" / f"broker.{suffix}"
        )
    fleet.reload()
    coordinator = fleet.transport(COORDINATOR)
    for _ in range(200):  # until the broker has read the files again
        try:
            coordinator.open(lambda _: None)
        except TransportError as error:
            assert "no TLS connection" in str(error)  # noqa: PT017
            return
        coordinator.close()
        coordinator = fleet.transport(COORDINATOR)
    pytest.fail("a device's certificate was taken for the broker's")


def test_a_revoked_device_is_refused_and_loses_its_open_connection(fleet, tmp_path):
    files = fleet.files(PI)
    kept = shutil.copytree(files.key_file.parent, tmp_path / "kept")
    coordinator = Party(fleet.transport(COORDINATOR)).open(watch=True)
    pi = Party(fleet.transport(PI)).open(b"hello")
    assert coordinator.takes_presence() == (PI, b"hello")
    revoke_device(fleet.folder, PI, now())
    add_device(fleet.folder, "fresh", now())
    fleet.reload()
    stolen = TlsFiles(kept / "ca.crt", kept / "device.crt", kept / "device.key")
    fresh = Party(fleet.transport("fresh"))
    while True:  # until the broker has read the list: then the new device is heard
        fresh.open(b"hello")
        fresh.transport.close()
        if not coordinator.seen.empty():
            break
        fresh = Party(fleet.transport("fresh"))
    assert coordinator.takes_presence() == ("fresh", b"hello")
    refused(fleet, PI, stolen)
    for channel in Channel:
        pi.transport.send(COORDINATOR, channel, b"still here")
        coordinator.transport.send(PI, channel, b"a secret")
    other = Party(fleet.transport(MALLORY)).open()
    other.transport.send(COORDINATOR, Channel.CONTROL, b"later")
    assert coordinator.take().payload == b"later"
    assert pi.inbox.empty()
    for party in (pi, other, coordinator):
        party.transport.close()


def test_a_device_cannot_speak_as_another(fleet):
    coordinator = Party(fleet.transport(COORDINATOR)).open(watch=True)
    rogue = Rogue(fleet, MALLORY, "rogue", f"{NS}/dev/{MALLORY}/from/+/control")
    for name in (PI, COORDINATOR):
        rogue.say(inbox(NS, COORDINATOR, name, Channel.CONTROL), b"forged")
        rogue.say(inbox(NS, MALLORY, name, Channel.CONTROL), b"forged")
    rogue.say(presence(NS, PI), b"forged", retain=True)
    rogue.say(presence(NS, MALLORY), b"mine", retain=True)
    rogue.say(inbox(NS, COORDINATOR, MALLORY, Channel.CONTROL), b"mine")
    assert coordinator.takes_presence() == (MALLORY, b"mine")
    arrived = coordinator.take()
    assert (arrived.source, arrived.payload) == (MALLORY, b"mine")
    assert coordinator.inbox.empty()
    assert rogue.heard == []
    rogue.link.close("done")
    coordinator.transport.close()


@pytest.mark.parametrize(
    "filters",
    [
        ("#",),
        (f"{NS}/#",),
        (f"{NS}/dev/{PI}/from/+/data", f"{NS}/dev/{PI}/from/+/control"),
        (f"{NS}/dev/+/from/+/data",),
        (f"{NS}/up/+/presence",),
        ("$SYS/#",),
    ],
    ids=["everything", "namespace", "one inbox", "all tensors", "presences", "broker"],
)
def test_a_device_reads_nothing_of_others(fleet, filters):
    mine = f"{NS}/dev/{MALLORY}/from/+/control"
    rogue = Rogue(fleet, MALLORY, "rogue", *filters, mine)
    coordinator = Party(fleet.transport(COORDINATOR)).open()
    pi = Party(fleet.transport(PI)).open(b"hello")
    for channel in Channel:
        coordinator.transport.send(PI, channel, b"a tensor")
        assert pi.take().payload == b"a tensor"
    coordinator.transport.send(MALLORY, Channel.CONTROL, b"last")
    topic = inbox(NS, MALLORY, COORDINATOR, Channel.CONTROL)
    with rogue.news:
        assert rogue.news.wait_for(lambda: (topic, b"last") in rogue.heard, 20)
    assert set(rogue.heard) == {(topic, b"last")}
    rogue.link.close("done")
    for party in (pi, coordinator):
        party.transport.close()


def test_a_device_cannot_take_over_the_connection_of_another(fleet):
    """It would need the 128 random bits of the id, which it has no way to read."""
    coordinator = Party(fleet.transport(COORDINATOR)).open(watch=True)
    pi = Party(fleet.transport(PI)).open(b"hello")
    assert coordinator.takes_presence() == (PI, b"hello")
    ids = [link._spec.client_id for link in pi.transport._links.values()]
    for channel, known in zip((Channel.CONTROL, Channel.DATA), sorted(ids), strict=True):
        assert known.startswith(f"{NS}-{PI}-{channel}-")
        assert len(bytes.fromhex(known.rpartition("-")[2])) == 16
        for guess in (
            f"{NS}-{PI}-{channel}-",
            f"{NS}-{PI}-{channel}-{secrets.token_hex(16)}",
            PI,
        ):
            rogue = Rogue(fleet, MALLORY, guess, f"{NS}/dev/{PI}/from/+/{channel}")
            coordinator.transport.send(PI, channel, b"still mine")
            assert pi.take().payload == b"still mine"
            assert rogue.heard == []
            rogue.link.close("done")
    assert coordinator.seen.empty()
    for party in (pi, coordinator):
        party.transport.close()


def test_a_leaked_client_id_gives_no_rights_and_the_device_comes_back(fleet):
    """Who reads the broker's own log can interrupt a device; mosquitto lets it."""
    coordinator = Party(fleet.transport(COORDINATOR)).open(watch=True)
    pi = Party(fleet.transport(PI)).open(b"hello")
    assert coordinator.takes_presence() == (PI, b"hello")
    known = pi.transport._links[Channel.CONTROL]._spec.client_id
    rogue = Rogue(fleet, MALLORY, known, f"{NS}/dev/{PI}/from/+/control")
    assert coordinator.takes_presence() == (PI, b"")
    assert coordinator.takes_presence() == (PI, b"hello")
    coordinator.transport.send(PI, Channel.CONTROL, b"a command")
    assert pi.take().payload == b"a command"
    assert rogue.heard == []
    rogue.link.kill("done")
    for party in (pi, coordinator):
        party.transport.close()


def test_another_fleet_on_the_same_machine_is_another_world(fleet, tmp_path):
    init_fleet(tmp_path / "other", Request((HOST,), (PI,), port=fleet.port), now())
    place = tmp_path / "other" / "devices" / PI
    files = TlsFiles(fleet.files(PI).ca_file, place / "device.crt", place / "device.key")
    refused(fleet, PI, files)
