"""The coordinator's way to its devices: to the broker, and how its commands are signed."""

from __future__ import annotations

import time
from pathlib import Path

from edgetrain.errors import ConfigError
from edgetrain.fleet_config import FleetConfig, fleet_table
from edgetrain.settings import decode
from edgetrain.transport.address import BrokerAddress
from edgetrain.transport.link import MqttSettings
from edgetrain.transport.mqtt import MqttTransport
from edgetrain.transport.tls import TlsFiles, check_private
from edgetrain.wire.signature import Signer
from edgetrain.wire.topics import COORDINATOR


def coordinator_transport(
    fleet: FleetConfig, password: str | None = None, url: str | None = None
) -> MqttTransport:
    """The coordinator's way to a broker; a password in the URL counts first.

    Args:
        fleet: says where the broker is and who we are there.
        password: where the URL has none.
        url: of the broker that the run starts itself.

    Raises:
        ConfigError: the URL cannot be used, or is another machine's without TLS.
    """
    place = url or fleet.broker
    if BrokerAddress.parse(place).password is not None:
        password = None
    return MqttTransport(place, COORDINATOR, password=password, settings=settings(fleet))


def settings(fleet: FleetConfig) -> MqttSettings:
    return MqttSettings(
        namespace=fleet.namespace,
        tls=TlsFiles(fleet.ca_file, fleet.cert_file, fleet.key_file),
        insecure=fleet.insecure,
    )


def signer(fleet: FleetConfig) -> Signer | None:
    """What signs the commands; None where no key is given.

    Raises:
        ConfigError: the key cannot be read or used, or others may read it.
    """
    path = fleet.signing_key_file
    if path is None:
        return None
    check_private(path)
    try:
        return Signer(path.read_bytes(), time.time_ns)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ConfigError as error:
        raise ConfigError(f"signing_key_file {path}: {error}") from error


def fleet_at(
    broker: str | None, namespace: str | None, fleet_file: Path | None, *, insecure: bool
) -> FleetConfig:
    """The section that a command's options stand for.

    Raises:
        ConfigError: they name no broker, or will not do.
    """
    table = fleet_table(fleet_file) if fleet_file else {}
    if broker is not None:
        table["broker"] = broker
    if namespace is not None:
        table["namespace"] = namespace
    if insecure:
        table["insecure"] = True
    if "broker" not in table:
        raise ConfigError(
            "which broker? Give --broker URL, or --fleet FILE as `edgetrain fleet init`"
            " writes it"
        )
    return decode(FleetConfig, table, folder=Path())
