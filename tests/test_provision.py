"""`edgetrain fleet`: what it writes, how safely, and what it refuses."""

from __future__ import annotations

import json
import shlex
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from readme import commands, section

from coordinator.cli import main
from coordinator.private_files import locked, write_file
from coordinator.provision import (
    Request,
    add_device,
    init_fleet,
    read_state,
    revoke_device,
)
from device_agent import config as agent_config
from edgetrain.errors import ConfigError
from edgetrain.fleet_config import FleetConfig, fleet_table
from edgetrain.settings import decode
from edgetrain.transport.tls import TlsFiles, client_context

NOW = datetime(2030, 1, 1, tzinfo=UTC)
REQUEST = Request(("broker.lan", "192.168.1.10"), ("pi", "npu"), namespace="lab")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    init_fleet(tmp_path / "fleet", REQUEST, NOW)
    return tmp_path / "fleet"


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def crl_of(folder: Path) -> x509.CertificateRevocationList:
    return x509.load_pem_x509_crl((folder / "broker" / "revoked.crl").read_bytes())


def revoked(folder: Path) -> set[int]:
    crl = crl_of(folder)
    assert crl.is_signature_valid(certificate(folder / "ca" / "ca.crt").public_key())
    return {entry.serial_number for entry in crl}


def test_secrets_are_for_their_owner_alone(folder):
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == 0o700, path
        elif path.suffix == ".key" or path.name in ("acl", "fleet.json"):
            assert mode == 0o600, path
        else:
            assert b"PRIVATE" not in path.read_bytes()
    assert not list(folder.rglob(".*"))


def test_certificates_say_who_and_for_what(folder):
    authority = certificate(folder / "ca" / "ca.crt")
    cases = {
        folder / "broker" / "broker.crt": ("broker", ExtendedKeyUsageOID.SERVER_AUTH),
        folder / "coordinator" / "coordinator.crt": (
            "coordinator",
            ExtendedKeyUsageOID.CLIENT_AUTH,
        ),
        folder / "devices" / "pi" / "device.crt": ("pi", ExtendedKeyUsageOID.CLIENT_AUTH),
        folder / "devices" / "npu" / "device.crt": ("npu", ExtendedKeyUsageOID.CLIENT_AUTH),
    }
    for path, (name, purpose) in cases.items():
        issued = certificate(path)
        issued.verify_directly_issued_by(authority)
        (common,) = issued.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        assert common.value == name
        usage = issued.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(usage) == [purpose]
        basic = issued.extensions.get_extension_for_class(x509.BasicConstraints).value
        assert not basic.ca
        assert issued.not_valid_before_utc < NOW < issued.not_valid_after_utc
    names = certificate(folder / "broker" / "broker.crt").extensions
    names = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"broker.lan", "localhost"}
    addresses = {str(a) for a in names.get_values_for_type(x509.IPAddress)}
    assert addresses == {"192.168.1.10", "127.0.0.1", "::1"}


def test_every_folder_is_ready_to_use(folder):
    config = agent_config.load(folder / "devices" / "pi" / "agent.toml")
    assert (config.broker, config.name) == ("mqtts://broker.lan:8883", "pi")
    assert config.namespace == "lab"
    client_context(TlsFiles(config.ca_file, config.cert_file, config.key_file))
    table = fleet_table(folder / "coordinator" / "fleet.toml")
    fleet = decode(FleetConfig, table, folder=Path("elsewhere"))
    assert fleet.namespace == "lab"
    client_context(TlsFiles(fleet.ca_file, fleet.cert_file, fleet.key_file))
    for party in ("devices/pi", "coordinator", "broker"):
        assert len((folder / party / "README").read_text().splitlines()) <= 4


def test_who_may_what_is_said_device_by_device(folder):
    rules = (folder / "broker" / "acl").read_text()
    assert "user pi\ntopic readwrite lab/up/pi/presence\n" in rules
    assert "topic write lab/dev/+/from/pi/data\ntopic read lab/dev/pi/from/+/data" in rules
    assert "pattern" not in rules
    assert "#" not in rules.split("\n", 1)[1]


def test_an_added_device_gets_in_and_a_revoked_one_out(folder):
    serial = certificate(folder / "devices" / "pi" / "device.crt").serial_number
    later = NOW + timedelta(days=1)
    assert add_device(folder, "late", later) == folder / "devices" / "late"
    assert "user late\n" in (folder / "broker" / "acl").read_text()
    assert revoked(folder) == set()
    revoke_device(folder, "pi", later)
    assert "user pi\n" not in (folder / "broker" / "acl").read_text()
    assert revoked(folder) == {serial}
    assert not (folder / "devices" / "pi").exists()
    add_device(folder, "pi", later)
    again = certificate(folder / "devices" / "pi" / "device.crt").serial_number
    assert again != serial
    assert revoked(folder) == {serial}
    revoke_device(folder, "pi", later)
    assert revoked(folder) == {serial, again}
    assert set(read_state(folder).devices) == {"npu", "late"}


def test_of_two_lists_made_at_once_the_second_is_the_later(folder):
    """A broker keeps both, and goes by their dates."""
    dates = [crl_of(folder).last_update_utc]
    for name in ("pi", "npu"):
        revoke_device(folder, name, NOW)
        dates.append(crl_of(folder).last_update_utc)
    assert dates[0] < dates[1] < dates[2] < NOW


def test_an_authority_that_is_there_is_kept(folder):
    before = content(folder)
    with pytest.raises(ConfigError, match="--replace"):
        init_fleet(folder, REQUEST, NOW)
    assert content(folder) == before
    again = Request(REQUEST.hosts, REQUEST.devices, replace=True)
    init_fleet(folder, again, NOW)
    assert content(folder)["ca/ca.crt"] != before["ca/ca.crt"]
    (old,) = folder.parent.glob("fleet.old-*")
    assert content(old) == before


@pytest.mark.parametrize(
    "name", ["pi", "coordinator", "", "a b", "../x", "..", ".x", "a/b"]
)
def test_names_that_will_not_do_change_nothing(folder, name):
    before = content(folder)
    with pytest.raises(ConfigError):
        add_device(folder, name, NOW)
    assert content(folder) == before
    assert {p.name for p in folder.parent.iterdir()} == {"fleet"}


@pytest.mark.parametrize(
    ("request_of", "words"),
    [
        ({"hosts": ()}, "--host"),
        ({"hosts": ("a b",)}, "'a b'"),
        ({"hosts": ('a"\nuser root',)}, "neither"),
        ({"hosts": ("h",), "port": 0}, "--port"),
        ({"hosts": ("h",), "days": 0}, "--days"),
        ({"hosts": ("h",), "namespace": "a/b"}, "--namespace"),
        ({"hosts": ("h",), "devices": ("a", "a")}, "twice"),
        ({"hosts": ("h",), "devices": ("..",)}, "begin"),
    ],
)
def test_wrong_requests_say_what_is_wrong(request_of, words):
    with pytest.raises(ConfigError, match=words):
        Request(**request_of)


def test_what_is_no_fleet_is_left_alone(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat").write_text("meow")
    for replace in (False, True):
        request = Request(("h",), replace=replace)
        for place in ("photos", "photos/cat"):
            with pytest.raises(ConfigError, match="is there already, and is no fleet's"):
                init_fleet(tmp_path / place, request, NOW)
    for change in (add_device, revoke_device):
        with pytest.raises(ConfigError, match=r"fleet\.json: cannot be read"):
            change(tmp_path / "photos", "pi", NOW)
        with pytest.raises(ConfigError, match="cannot be opened"):
            change(tmp_path / "none", "pi", NOW)
    assert content(tmp_path) == {"photos/cat": b"meow"}
    (tmp_path / "empty").mkdir()
    init_fleet(tmp_path / "empty", REQUEST, NOW)


def test_an_authority_that_others_can_read_signs_no_more(folder):
    (folder / "ca" / "ca.key").chmod(0o644)
    before = content(folder)
    with pytest.raises(ConfigError, match="chmod 600"):
        add_device(folder, "late", NOW)
    assert content(folder) == before


def test_only_one_at_a_time_changes_a_fleet(folder):
    with locked(folder), pytest.raises(ConfigError, match="another `edgetrain fleet`"):
        add_device(folder, "late", NOW)
    add_device(folder, "late", NOW)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    write_file(tmp_path / "a", b"one", 0o600)
    write_file(tmp_path / "a", b"two", 0o600)
    assert content(tmp_path) == {"a": b"two"}
    with pytest.raises(ConfigError, match="cannot be written"):
        write_file(tmp_path / "none" / "a", b"x")


def test_the_commands_of_the_page_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for line in commands(section("## Change a fleet", "docs/security.md")):
        assert main(shlex.split(line)[1:]) == 0
    capsys.readouterr()
    assert set(read_state(tmp_path / "fleet").devices) == {"pi", "npu"}
    assert len(revoked(tmp_path / "fleet")) == 1


def test_the_commands(tmp_path, capsys):
    place = str(tmp_path / "fleet")
    assert main(["fleet", "init", place, "--host", "b.lan", "--devices", "pi,npu"]) == 0
    assert "mqtts://b.lan:8883" in capsys.readouterr().out
    assert main(["fleet", "add", place, "late"]) == 0
    assert "kill -HUP" in capsys.readouterr().out
    assert main(["fleet", "revoke", place, "pi"]) == 0
    assert "kill -HUP" in capsys.readouterr().out
    state = json.loads((tmp_path / "fleet" / "fleet.json").read_text())
    assert set(state["devices"]) == {"npu", "late"}
    assert main(["fleet", "revoke", place, "pie"]) == 2
    assert "allowed: late, npu" in capsys.readouterr().err
    assert main(["fleet", "init", place]) == 2
    assert "--replace" in capsys.readouterr().err
