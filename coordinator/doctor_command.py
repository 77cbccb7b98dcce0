"""`edgetrain doctor`: whom it examines a broker for, and how it says what it found."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from coordinator.connection import settings
from coordinator.doctor import Party
from coordinator.finding import Finding, Verdict
from coordinator.tables import Column, print_table
from device_agent import config as agent_config
from edgetrain.fleet_config import FleetConfig
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.tls import TlsFiles
from edgetrain.wire.topics import COORDINATOR

_COLUMNS: Final = (Column(""), Column("check"), Column("found"), Column("what to change"))


def as_coordinator(fleet: FleetConfig, password: str | None) -> Party:
    return Party(fleet.broker, COORDINATOR, settings(fleet), password)


def as_device(agent_file: Path, password: str | None) -> Party:
    """The device of an agent file.

    Raises:
        ConfigError: the file cannot be read or used.
    """
    config = agent_config.load(agent_file)
    place = MqttSettings(
        namespace=config.namespace,
        tls=TlsFiles(config.ca_file, config.cert_file, config.key_file),
        insecure=config.insecure,
    )
    return Party(config.broker, config.name, place, config.password() or password)


def show(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Write a table, or an object with the key "findings".

    Returns:
        The exit code: 1 if something must be changed.
    """
    found = list(findings)
    if as_json:
        print(msgspec.json.encode({"findings": found}).decode())
    else:
        rows = [(f.verdict.value, f.check, f.found, f.advice) for f in found]
        print_table(_COLUMNS, rows)
        changes = sum(f.verdict is Verdict.CHANGE for f in found)
        print(f"{changes} to change" if changes else "nothing to change")
    return int(any(f.verdict is Verdict.CHANGE for f in found))
