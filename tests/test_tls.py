"""TLS files and plain connections: what is refused, and how that is said."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coordinator.certificates import issue_device, make_authority
from coordinator.cli import main as edgetrain
from device_agent.cli import main as agent
from edgetrain.errors import ConfigError
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.transport.tls import TlsFiles, check_plain, client_context

NOW = datetime(2030, 1, 1, tzinfo=UTC)
FAR = "mqtt://192.0.2.1:1883"  # a documentation address: nobody is there


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    authority = make_authority("fleet", NOW)
    pair = issue_device(authority, "pi", NOW)
    found = TlsFiles(tmp_path / "ca.crt", tmp_path / "pi.crt", tmp_path / "pi.key")
    found.ca_file.write_bytes(authority.certificate)
    found.cert_file.write_bytes(pair.certificate)
    found.key_file.touch(mode=0o600)
    found.key_file.write_bytes(pair.key)
    return found


def test_good_files_do(files):
    client_context(files)
    files.key_file.chmod(0o400)
    client_context(files)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o666, 0o620])
def test_a_key_that_others_can_reach_is_refused(files, mode):
    files.key_file.chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}.*chmod 600"):
        client_context(files)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of root's")
def test_a_key_that_root_hands_to_a_group_will_do(files):
    """As systemd's LoadCredential does."""
    files.key_file.chmod(0o440)
    client_context(files)


def test_files_that_will_not_do_are_named(files, tmp_path):
    missing = tmp_path / "none"
    other = issue_device(make_authority("x", NOW), "x", NOW)
    strange = tmp_path / "strange.key"
    strange.touch(mode=0o600)
    strange.write_bytes(other.key)
    cases = [
        (TlsFiles(missing), "authorities from .*none"),
        (TlsFiles(files.ca_file, files.cert_file), "go together"),
        (TlsFiles(files.ca_file, None, files.key_file), "go together"),
        (TlsFiles(files.ca_file, files.cert_file, missing), "none: cannot be read"),
        (TlsFiles(files.ca_file, missing, files.key_file), "cannot use the certificate"),
        (TlsFiles(files.ca_file, files.cert_file, strange), "PEM files of one party"),
        (TlsFiles(files.cert_file, files.ca_file, files.key_file), "PEM files of one"),
    ]
    for broken, words in cases:
        with pytest.raises(ConfigError, match=words):
            client_context(broken)


@pytest.mark.parametrize(
    "url", ["mqtt://localhost", "mqtt://127.0.0.1:9", "mqtt://127.9.9.9", "mqtt://[::1]",
            "mqtts://192.0.2.1", "mqtts://far.example"],
)  # fmt: skip
def test_plain_is_for_this_machine(url):
    check_plain(BrokerAddress.parse(url), insecure=False)


@pytest.mark.parametrize(
    "url", [FAR, "mqtt://far.example", "mqtt://localhost.example", "mqtt://0.0.0.0",
            "mqtt://[::]", "mqtt://127.0.0.1.example"],
)  # fmt: skip
def test_plain_to_another_machine_must_be_asked_for(url):
    with pytest.raises(ConfigError, match=r"neither encrypted.*--insecure"):
        MqttTransport(url, "pi")
    MqttTransport(url, "pi", settings=MqttSettings(insecure=True))


def test_the_agent_says_so(capsys):
    assert agent(["probe", "--quick", "--broker", FAR, "--name", "pi"]) == 2
    assert "--insecure" in capsys.readouterr().err


def test_the_coordinator_says_so(capsys):
    assert edgetrain(["devices", "--broker", FAR]) == 2
    assert "--insecure" in capsys.readouterr().err


def test_a_command_without_a_broker_says_so(capsys):
    for command in ("devices", "doctor"):
        assert edgetrain([command]) == 2
        assert "--fleet FILE" in capsys.readouterr().err
