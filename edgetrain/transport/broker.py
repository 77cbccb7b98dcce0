"""The embedded broker: mosquitto when it is installed, else the one in the iotcore wheel.

It listens on the loopback address only and takes one user, whose password is made for the
run. For devices on other machines, install a broker of your own.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgetrain.errors import ConfigError, TransportError
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.mqtt import MqttTransport

log = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
USER: Final = "edgetrain"

_CHILD: Final = Path(__file__).with_name("broker_child.py")
_START_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.02
_PORT_TRIES: Final = 3
_HASH_ROUNDS: Final = 101  # mosquitto's own; the password is random, so few will do

# A queue of `max_queued_messages` 256 KiB frames holds any burst that the schedules allow;
# zero would mean "none" to some versions. Mosquitto refuses comments after a value.
_MOSQUITTO_CONF: Final = """\
listener {port} {host}
allow_anonymous false
password_file {directory}/passwords
set_tcp_nodelay true
max_packet_size 1048576
max_inflight_messages 64
max_queued_messages 8192
persistence false
log_dest stderr
log_type error
log_type warning
"""

# rumqttd keeps what it routed in memory until a filter's segments wrap around.
_IOTCORE_TOML: Final = """\
id = 0

[router]
id = 0
max_connections = 1000
max_outgoing_packet_count = 200
max_segment_size = 16777216
max_segment_count = 4

[v4.1]
name = "v4-1"
listen = "{host}:{port}"
next_connection_delay_ms = 1

[v4.1.connections]
connection_timeout_ms = 5000
max_payload_size = 1048576
max_inflight_count = 100
dynamic_filters = true

[v4.1.connections.auth]
{user} = "{token}"
"""


class Broker:
    """A running broker; a context manager that stops it.

    Attributes:
        kind: "mosquitto" or "iotcore".
        url: where it is, with user and password.
    """

    def __init__(
        self, kind: str, url: str, process: subprocess.Popen[bytes], directory: Path
    ) -> None:
        self.kind = kind
        self.url = url
        self._process = process
        self._directory = directory

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End it and remove its files. Safe to call twice."""
        end_child(self._process, _STOP_TIMEOUT_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def embedded_broker(
    *,
    port: int = 0,
    directory: Path | None = None,
    kind: str | None = None,
    password: str | None = None,
) -> Broker:
    """Start a broker and return once it takes connections.

    Args:
        port: to listen on; 0 takes a free one.
        directory: where its private folder goes; the system's place for temporary files
            when None.
        kind: "mosquitto" or "iotcore"; by default the first that is there.
        password: a new one when None; that of an earlier broker lets its clients come back.

    Raises:
        ConfigError: `kind` is neither.
        TransportError: it is not installed, or does not start; with what it said.
    """
    if kind is None:
        kind = "mosquitto" if shutil.which("mosquitto") else "iotcore"
    # Between choosing a free port and listening on it, somebody else may take it.
    for _ in range(0 if port else _PORT_TRIES - 1):
        with contextlib.suppress(TransportError):
            return _start(kind, _free_port(), directory, password)
    return _start(kind, port or _free_port(), directory, password)


def end_child(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Close its standard input, which ends it; insist if that takes long."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _start(kind: str, port: int, parent: Path | None, password: str | None) -> Broker:
    token = password or secrets.token_urlsafe(24)
    url = f"mqtt://{USER}:{token}@{HOST}:{port}"
    with contextlib.ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix="edgetrain-broker-", dir=parent))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        arguments = _configure(kind, folder, port, token)
        with (folder / "broker.log").open("wb") as output:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", str(_CHILD), kind, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C is the coordinator's to handle
            )
        undo.callback(end_child, process, _STOP_TIMEOUT_S)
        _await_ready(kind, process, url, folder / "broker.log")
        undo.pop_all()
    log.info("%s listens on %s:%d", kind, HOST, port)
    return Broker(kind, url, process, folder)


def _configure(kind: str, folder: Path, port: int, token: str) -> list[str]:
    """Write the broker's files; return the child's arguments."""
    if kind == "mosquitto":
        program = shutil.which("mosquitto")
        if program is None:
            raise TransportError("mosquitto is not on PATH: install it, or use iotcore")
        text = _MOSQUITTO_CONF.format(host=HOST, port=port, directory=folder)
        if os.geteuid() == 0:
            text += "user root\n"  # else it drops to a user who cannot read our folder
        _write_private(folder / "passwords", f"{USER}:{_mosquitto_hash(token)}\n")
        _write_private(folder / "mosquitto.conf", text)
        return [str(folder / "mosquitto.conf"), program, "-c"]
    if kind == "iotcore":
        text = _IOTCORE_TOML.format(host=HOST, port=port, user=USER, token=token)
        _write_private(folder / "iotcore.toml", text)
        return [str(folder / "iotcore.toml")]
    raise ConfigError(f"no broker of kind {kind!r}: mosquitto or iotcore")


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def _mosquitto_hash(password: str) -> str:
    """A password as mosquitto's password file keeps it: PBKDF2 with SHA-512."""
    salt = secrets.token_bytes(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _HASH_ROUNDS)
    parts = (base64.b64encode(part).decode() for part in (salt, digest))
    return f"$7${_HASH_ROUNDS}${'$'.join(parts)}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _await_ready(
    kind: str, process: subprocess.Popen[bytes], url: str, log_path: Path
) -> None:
    """Wait until a party can connect with the run's password.

    Raises:
        TransportError: the broker ended, or no one could in time.
    """
    why = ""
    for _ in _ticks(_START_TIMEOUT_S):
        if process.poll() is not None:
            why = f"it ended with code {process.returncode}"
            break
        probe = MqttTransport(url, "probe", settings=MqttSettings(connect_timeout_s=1.0))
        try:
            probe.open(lambda _: None)
        except TransportError as error:
            why = str(error)
        else:
            probe.close()
            return
    said = log_path.read_text(errors="replace").strip()[-1000:] or "nothing"
    raise TransportError(
        f"the embedded broker ({kind}) did not start: {why}. It said: {said}. Is iotcore"
        " installed (pip install iotcore), or mosquitto, and the port free?"
    )


def _ticks(timeout_s: float) -> Iterator[None]:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        yield
        time.sleep(_POLL_S)
