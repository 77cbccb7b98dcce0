"""The embedded broker: private, local, and gone when its parent is."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from party import mosquitto

from edgetrain.errors import ConfigError, TransportError
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.broker import embedded_broker
from edgetrain.transport.mqtt import MqttTransport

every_kind = pytest.mark.parametrize("kind", [mosquitto, "iotcore"])


def listens(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


@every_kind
def test_it_is_local_private_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    with embedded_broker(kind=kind, directory=tmp_path) as broker:
        address = BrokerAddress.parse(broker.url)
        assert (broker.kind, broker.is_running, address.host) == (kind, True, "127.0.0.1")
        assert listens(address.port)
        assert not listens(address.port, "127.0.0.2")
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert all(
            path.name == "broker.log" or path.stat().st_mode & 0o077 == 0
            for path in folder.iterdir()
        )
        assert os.getsid(broker._process.pid) != os.getsid(0)
    broker.stop()
    assert not broker.is_running
    assert not listens(address.port)
    assert list(tmp_path.iterdir()) == []


@every_kind
def test_it_takes_nobody_without_the_runs_password(kind: str) -> None:
    with embedded_broker(kind=kind) as broker, embedded_broker(kind=kind) as other:
        address = BrokerAddress.parse(broker.url)
        token = BrokerAddress.parse(other.url).password
        assert token != address.password
        for login in ({}, {"username": address.username, "password": token}):
            transport = MqttTransport(str(address), "stranger", **login)
            with pytest.raises(TransportError, match="password"):
                transport.open(lambda _: None)


@every_kind
def test_a_port_in_use_is_said_in_the_brokers_own_words(kind: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(TransportError, match=r"(?s)did not start: .*in use"):
            embedded_broker(kind=kind, port=taken.getsockname()[1])


@every_kind
def test_it_ends_when_its_parent_is_killed(kind: str) -> None:
    program = (
        "from edgetrain.transport.broker import embedded_broker\n"
        f"broker = embedded_broker(kind={kind!r})\n"
        "print(broker.url, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        port = BrokerAddress.parse(parent.stdout.readline().strip()).port
        assert listens(port)
        parent.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 10
    while listens(port) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not listens(port)


def test_a_broker_that_fails_is_quoted(tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "mosquitto"
    program.write_text("#!/bin/sh\necho the cause >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(TransportError, match=r"ended with code 3\..*the cause"):
        embedded_broker(directory=tmp_path)
    assert list(tmp_path.iterdir()) == [program]


def test_without_mosquitto_it_is_iotcore(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with embedded_broker() as broker:
        assert broker.kind == "iotcore"
    with pytest.raises(TransportError, match="not on PATH"):
        embedded_broker(kind="mosquitto")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="mosquitto or iotcore"):
        embedded_broker(kind="other")
