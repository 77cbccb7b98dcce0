"""TLS to a broker: whom to trust, who we are, and when a connection may be plain."""

from __future__ import annotations

import ipaddress
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgetrain.errors import ConfigError
from edgetrain.transport.address import BrokerAddress

_LOCAL: Final = "localhost"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a party; the system's authorities and no certificate by default.

    Attributes:
        ca_file: authorities that may have signed the broker's certificate.
        cert_file, key_file: what this party shows the broker; both or neither.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def __bool__(self) -> bool:
        return any((self.ca_file, self.cert_file, self.key_file))


NO_FILES: Final = TlsFiles()


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """What checks the broker's certificate and host name, and shows ours.

    Raises:
        ConfigError: a file cannot be read or used, or others may read the key.
    """
    try:
        context = ssl.create_default_context(cafile=files.ca_file)
    except OSError as error:
        raise ConfigError(
            f"cannot read certificate authorities from {files.ca_file}: {error}. Give a"
            " PEM file"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if (files.cert_file is None) != (files.key_file is None):
        raise ConfigError("cert_file and key_file go together: the key proves the first")
    if files.cert_file is None or files.key_file is None:
        return context
    check_private(files.key_file)
    try:
        context.load_cert_chain(files.cert_file, files.key_file, password="")
    except OSError as error:
        raise ConfigError(
            f"cannot use the certificate {files.cert_file} with the key {files.key_file}:"
            f" {error}. Give the PEM files of one party, without a passphrase"
        ) from error
    return context


def check_private(path: Path) -> None:
    """Refuse a secret that others on this machine can read.

    Root's files may be readable by a group: so service managers hand secrets over.

    Raises:
        ConfigError: it is not there, or its mode is too wide.
    """
    try:
        facts = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    allowed = stat.S_IRWXU | (stat.S_IRGRP if facts.st_uid == 0 else 0)
    mode = stat.S_IMODE(facts.st_mode)
    if mode & ~allowed:
        raise ConfigError(
            f"{path} holds a secret, and its mode {mode:04o} lets others on this machine at"
            f" it: chmod 600 {path}; if others could read it for long, have a new one made"
        )


def check_plain(address: BrokerAddress, *, insecure: bool) -> None:
    """Refuse to talk to another machine without TLS.

    Raises:
        ConfigError: saying the ways out.
    """
    if address.tls or insecure or is_local(address.host):
        return
    raise ConfigError(
        f"{address} is another machine, and mqtt:// is neither encrypted nor checked:"
        " anyone on the way could read passwords and samples, or send commands. Use"
        " mqtts:// (`edgetrain fleet init` makes all that it needs), or, on a network that"
        " you trust, say --insecure (agent file: insecure = true; run file: [fleet]"
        " insecure = true)"
    )


def is_local(host: str) -> bool:
    """Whether it is this very machine, by its name or address alone."""
    if host == _LOCAL:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
