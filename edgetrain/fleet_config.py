"""The `[fleet]` section: which broker, who we are there, and which devices take part."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from edgetrain.errors import ConfigError
from edgetrain.settings import (
    Section,
    check_broker_url,
    check_device_name,
    check_distinct,
    read_table,
    require,
)
from edgetrain.simulated_device import SimulatedDevice

EMBEDDED: Final = "embedded"
FLEET: Final = "fleet"
_FILE_KEYS: Final = ("ca_file", "cert_file", "key_file", "signing_key_file")


class FleetConfig(Section, frozen=True):
    """``[fleet]``.

    Attributes:
        broker: ``"embedded"`` or a URL.
        ca_file: authorities that may have signed the broker's certificate; the system's
            when None.
        cert_file, key_file: the coordinator's own certificate, for a broker that asks.
        signing_key_file: signs commands, for devices that take no others.
        insecure: whether ``mqtt://`` to another machine will do.
        devices: how many, or their names; None: the simulated ones, or one.
        wait_s: how long to wait for them to appear.
        step_timeout_s: without a sign of progress for so long, the run has failed.
        max_packet_bytes: that the broker takes; None: as it says itself, where it does.
            131072 suits the brokers of clouds.
    """

    broker: str = EMBEDDED
    namespace: str = "edgetrain"
    devices: int | tuple[str, ...] | None = None
    wait_s: float = 60.0
    step_timeout_s: float = 60.0
    simulate: tuple[SimulatedDevice, ...] = ()
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    signing_key_file: Path | None = None
    insecure: bool = False
    max_packet_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.broker != EMBEDDED:
            check_broker_url("[fleet] broker", self.broker)
        check_device_name("[fleet] namespace", self.namespace)
        for key in ("wait_s", "step_timeout_s"):
            value = getattr(self, key)
            require(0 < value < math.inf, f"[fleet] {key} = {value}: must be above 0")
        most = self.max_packet_bytes
        require(
            most is None or most >= 1 << 15,
            f"[fleet] max_packet_bytes = {most}: must be 32768 or more",
        )
        self._check_files()
        self._check_devices()

    @property
    def count(self) -> int:
        """Devices the run needs."""
        if self.devices is None:
            return max(1, len(self.simulate))
        return self.devices if isinstance(self.devices, int) else len(self.devices)

    @property
    def names(self) -> tuple[str, ...]:
        """Devices that must be among them."""
        if isinstance(self.devices, tuple):
            return self.devices
        return tuple(device.name for device in self.simulate)

    def _check_files(self) -> None:
        require(
            (self.cert_file is None) == (self.key_file is None),
            "[fleet] cert_file and key_file go together: the key proves the certificate",
        )
        require(
            self.broker.startswith("mqtts://")
            or not (self.ca_file or self.cert_file or self.key_file),
            "[fleet] ca_file, cert_file and key_file are for a broker at mqtts://",
        )
        require(
            self.cert_file is None or not self.simulate,
            "[fleet] simulate: simulated devices have no certificates of their own; leave"
            " them out ('fleet.simulate=[]'), or start agents with folders that"
            " `edgetrain fleet add` made",
        )

    def _check_devices(self) -> None:
        simulated = [device.name for device in self.simulate]
        check_distinct("[fleet] simulate", simulated)
        if isinstance(self.devices, tuple):
            for name in self.devices:
                check_device_name("[fleet] devices", name)
            check_distinct("[fleet] devices", self.devices)
            missing = sorted(set(simulated) - set(self.devices))
            require(
                not missing, f"[fleet] devices lacks the simulated {', '.join(missing)}"
            )
        require(
            self.count >= max(1, len(simulated)),
            f"[fleet] devices = {self.count} is fewer than needed: at least one, and all"
            f" {len(simulated)} of simulate",
        )


def fleet_table(path: Path) -> dict[str, Any]:
    """The [fleet] section of a file that holds nothing else, with its paths made absolute.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    table = read_table(path)
    fleet = table.get(FLEET)
    if set(table) != {FLEET} or not isinstance(fleet, dict):
        raise ConfigError(f"{path}: must hold one section, [fleet], and nothing else")
    for key in _FILE_KEYS:
        if isinstance(text := fleet.get(key), str):
            fleet[key] = str(path.parent.absolute() / Path(text).expanduser())
    return fleet
