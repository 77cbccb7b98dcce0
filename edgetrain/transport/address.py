"""Where a broker is, read from a URL, and printed without its password."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from edgetrain.errors import ConfigError

_PORTS: Final[Mapping[str, int]] = {"mqtt": 1883, "mqtts": 8883}


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Prints as its URL without user and password."""

    host: str
    port: int
    tls: bool
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> BrokerAddress:
        """Read ``mqtt://[user[:password]@]host[:port]``, or ``mqtts://`` for TLS.

        Raises:
            ConfigError: it is not such a URL.
        """
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError:
            scheme, host, port = "", None, None
        if scheme not in _PORTS or not host or parts.path.strip("/") or parts.query:
            raise ConfigError(
                f"{_without_login(url)!r} is not a broker's URL: write"
                " mqtt://user:password@host:1883, or mqtts://user:password@host:8883 for"
                " TLS; '@', '/' and ':' in a password as %40, %2F and %3A"
            )
        return cls(
            host,
            port or _PORTS[scheme],
            scheme == "mqtts",
            unquote(parts.username) if parts.username else None,
            unquote(parts.password) if parts.password else None,
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self.tls else 'mqtt'}://{host}:{self.port}"


def _without_login(url: str) -> str:
    scheme, mark, rest = url.rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"
