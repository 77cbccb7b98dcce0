"""A fleet's folder, its mosquitto, and parties with the identities of the folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from coordinator.provision import Request, init_fleet
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.transport.tls import TlsFiles
from edgetrain.wire.topics import COORDINATOR

HOST = "127.0.0.1"
WAIT_S = 20.0  # only a failing test waits this long


def now() -> datetime:
    return datetime.now(UTC)


@dataclass
class SecureFleet:
    """What `edgetrain fleet init` made, and the broker that runs from it."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"mqtts://{HOST}:{self.port}"

    @property
    def fleet_file(self) -> Path:
        return self.folder / COORDINATOR / "fleet.toml"

    def agent_file(self, name: str) -> Path:
        return self.folder / "devices" / name / "agent.toml"

    def files(self, name: str) -> TlsFiles:
        if name == COORDINATOR:
            place, stem = self.folder / COORDINATOR, COORDINATOR
        else:
            place, stem = self.folder / "devices" / name, "device"
        return TlsFiles(place / "ca.crt", place / f"{stem}.crt", place / f"{stem}.key")

    def transport(self, name: str, files: TlsFiles | None = None) -> MqttTransport:
        """A party of that name, with its own files unless others are given."""
        settings = MqttSettings(tls=files or self.files(name))
        return MqttTransport(self.url, name, settings=settings)

    def reload(self) -> None:
        self.process.send_signal(signal.SIGHUP)


@contextmanager
def secure_fleet(folder: Path, *devices: str) -> Iterator[SecureFleet]:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    init_fleet(folder, Request((HOST,), devices, port=port), now())
    with mosquitto(folder, port) as process:
        yield SecureFleet(folder, port, process)


@contextmanager
def mosquitto(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Mosquitto on a fleet's own configuration."""
    conf = folder / "broker" / "mosquitto.conf"
    if os.geteuid() == 0:  # else it drops to a user who cannot read the folder
        text = conf.read_text().removeprefix("user root\n")
        conf.write_text(f"user root\n{text}")
    with (folder / "mosquitto.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603
            ["mosquitto", "-c", conf],  # noqa: S607
            stdout=log,
            stderr=log,
        )
    try:
        deadline_s = time.monotonic() + WAIT_S
        while not _listens(port):
            assert process.poll() is None, (folder / "mosquitto.log").read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.wait(WAIT_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
