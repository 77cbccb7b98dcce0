"""The agent file: who this device is, which broker it joins and what it may use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgetrain.abilities import ABILITIES
from edgetrain.errors import ConfigError
from edgetrain.settings import (
    Section,
    check_broker_url,
    check_device_name,
    choose,
    decode,
    override,
    read_table,
    require,
    size_bytes,
)
from edgetrain.train_config import AUTO, GRADIENTS


class DatasetConfig(Section, frozen=True):
    """Files of one named data set; the samples never leave this device."""

    train: Path
    eval: Path | None = None


class AgentConfig(Section, frozen=True):
    """A whole agent file.

    Attributes:
        broker: ``mqtt://[user@]host[:port]`` or ``mqtts://...``.
        name: this device's, unique in its namespace.
        namespace: first word of all topics.
        threads: for the inference engine; None: as the profile found best, 1 without one.
        memory: that a stage may take: bytes, text such as ``"512 MB"``, or ``"auto"``:
            what is free.
        gradient: ``"auto"`` offers all that the probe finds possible; a mode, only that.
        runs: what the engine may be given beside plain forwards: of ``"backward"``,
            ``"jvp"`` and ``"weights"``; the probe may find it runs fewer.
        datasets: by the name a run file asks for.
        profile: a file that `edgetrain-agent probe --out` wrote on this device.
        password_file: holds the broker password on its first line.
        ca_file: authorities that may have signed the broker's certificate; the system's
            when None.
        cert_file, key_file: this device's own certificate, for a broker that asks.
        coordinator_key_file: the public key of the only coordinator it obeys.
        insecure: whether ``mqtt://`` to another machine will do.
    """

    broker: str
    name: str
    namespace: str = "edgetrain"
    threads: int | None = None
    memory: int | str = AUTO
    gradient: str = AUTO
    runs: tuple[str, ...] = ABILITIES
    datasets: dict[str, DatasetConfig] = msgspec.field(default_factory=dict)
    profile: Path | None = None
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    coordinator_key_file: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        check_broker_url("broker", self.broker)
        check_device_name("name", self.name)
        check_device_name("namespace", self.namespace)
        if self.threads is not None:
            require(self.threads > 0, f"threads = {self.threads}: must be 1 or more")
        require(
            (self.cert_file is None) == (self.key_file is None),
            "cert_file and key_file go together: the key proves the certificate",
        )
        choose("gradient", self.gradient, GRADIENTS)
        for word in self.runs:
            choose("runs", word, ABILITIES)
        if self.memory != AUTO:
            size_bytes("memory", self.memory)

    @property
    def memory_bytes(self) -> int | None:
        """The limit in bytes; None for ``"auto"``."""
        return None if self.memory == AUTO else size_bytes("memory", self.memory)

    def password(self) -> str | None:
        """The broker password of `password_file`; None without such a file.

        Raises:
            ConfigError: the file cannot be read or is empty.
        """
        if self.password_file is None:
            return None
        try:
            text = self.password_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"password_file {self.password_file} cannot be read: {error}"
            ) from error
        password = text.partition("\n")[0].rstrip("\r")
        require(bool(password), f"password_file {self.password_file}: first line is empty")
        return password


def load(path: Path | None, overrides: Sequence[str] = ()) -> AgentConfig:
    """Read an agent file, or take all settings from the options.

    Args:
        path: of the TOML file; relative paths in it are taken from its folder. None: no
            file; relative paths are taken from the current folder.
        overrides: ``key=value``, applied over it.

    Raises:
        ConfigError: naming the file, the key and what is allowed.
    """
    table = read_table(path) if path else {}
    folder = path.parent if path else Path()
    source = path or "agent options"
    try:
        override(table, overrides)
        return decode(AgentConfig, table, folder=folder)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
