"""The doctor finds nothing on a good broker, and each fault on one that has it."""

from __future__ import annotations

import json
import shutil
import socket

import pytest
from secure_fleet import secure_fleet

from coordinator.cli import main
from edgetrain.transport import broker as embedded
from edgetrain.transport.broker import embedded_broker

ASKED = pytest.mark.skipif(shutil.which("mosquitto") is None, reason="no mosquitto on PATH")


@pytest.fixture
def doctor(capsys):
    """Runs it; what it found by check, and the exit code."""

    def run(*arguments: str) -> tuple[dict[str, dict[str, str]], int]:
        code = main(["doctor", *arguments, "--json"])
        findings = json.loads(capsys.readouterr().out)["findings"]
        return {finding["check"]: finding for finding in findings}, code

    return run


def changes(found: dict[str, dict[str, str]]) -> set[str]:
    for finding in found.values():
        assert bool(finding["advice"]) == (finding["verdict"] == "change")
    return {name for name, f in found.items() if f["verdict"] == "change"}


RIGHTS = {
    "speaking as another",
    "presence of another",
    "reading another's inbox",
    "reading everything",
}


@ASKED
def test_a_fleet_of_our_own_making_is_well(doctor, tmp_path, capsys):
    with secure_fleet(tmp_path / "fleet", "pi") as fleet:
        for place in (
            ("--fleet", fleet.fleet_file),
            ("--agent", fleet.agent_file("pi")),
        ):
            found, code = doctor(*map(str, place))
            assert (changes(found), code) == (set(), 0)
            assert found["TLS"]["found"].startswith("TLSv1.3")
            assert found["largest packet"]["found"] == "1.05 MB"
            assert found.keys() >= {*RIGHTS, "strangers", "throughput", "our certificate"}
        assert main(["doctor", "--fleet", str(fleet.fleet_file)]) == 0
        assert "nothing to change" in capsys.readouterr().out
        found, code = doctor("--broker", fleet.url)
        assert (changes(found), code) == ({"TLS"}, 1)
        assert "ca_file" in found["TLS"]["advice"]


@ASKED
def test_each_fault_of_a_careless_configuration_is_named(doctor, monkeypatch):
    """No access list, packets held back, small packets only, strangers let in."""
    careless = (
        embedded._MOSQUITTO_CONF.replace("allow_anonymous false", "allow_anonymous true")
        .replace("set_tcp_nodelay true", "set_tcp_nodelay false")
        .replace("max_packet_size 1048576", "max_packet_size 200000")
    )
    monkeypatch.setattr(embedded, "_MOSQUITTO_CONF", careless)
    with embedded_broker(kind="mosquitto") as broker:
        found, code = doctor("--broker", broker.url)
    faults = {"strangers", "largest packet", "small messages", *RIGHTS}
    assert (changes(found), code) == (faults, 1)
    assert "set_tcp_nodelay true" in found["small messages"]["advice"]
    assert "max_packet_size" in found["largest packet"]["advice"]
    assert "acl_file" in found["reading everything"]["advice"]


def test_the_broker_in_the_wheel_is_known_to_have_no_access_list(doctor):
    with embedded_broker(kind="iotcore") as broker:
        found, code = doctor("--broker", broker.url)
        assert (changes(found), code) == (RIGHTS, 1)
        assert found["largest packet"]["verdict"] == "note"
        wrong = broker.url.replace("edgetrain:", "edgetrain:x")
        found, code = doctor("--broker", wrong)
        assert (changes(found), code) == ({"identity"}, 1)
        assert "password" in found["identity"]["found"]


def test_no_broker_ends_the_examination(doctor):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        found, code = doctor("--broker", f"mqtt://127.0.0.1:{bound.getsockname()[1]}")
    assert (set(found), code) == ({"reachable"}, 1)


def test_plain_to_another_machine_ends_it_before_a_password_is_sent(doctor):
    """By its address, 0.0.0.0 might be another; on Linux it leads here."""
    with embedded_broker() as broker:
        far = broker.url.replace("127.0.0.1", "0.0.0.0")  # noqa: S104
        found, code = doctor("--broker", far)
        assert (set(found), changes(found), code) == ({"reachable", "TLS"}, {"TLS"}, 1)
        found, code = doctor("--broker", far, "--insecure")
        assert {"TLS"} < changes(found)
        assert "throughput" in found
