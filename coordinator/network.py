"""The links between the devices of a run and its broker, as far as they are known."""

from __future__ import annotations

from typing import Final, NamedTuple

from edgetrain.config import EMBEDDED, FleetConfig
from edgetrain.wire.hello import Hello


class DeviceLink(NamedTuple):
    """One device's way to the broker: bytes a second either way, seconds of one leg."""

    bytes_per_s: float
    latency_s: float


# Over a broker on the same machine a tensor of n bytes takes 0.6 to 1.2 ms + n / 400 MB/s,
# as measured; of an unknown network no more is assumed than 100 Mbit/s.
LOCAL: Final = DeviceLink(400e6, 0.3e-3)
UNKNOWN: Final = DeviceLink(12.5e6, 1e-3)
HOP_OVERHEAD_S: Final = 0.3e-3  # framing, publishing, handing over


def link_of(hello: Hello, fleet: FleetConfig) -> DeviceLink:
    """A device's link: as it was measured, else what is usual for such a fleet."""
    profile = hello.profile
    if profile is not None and profile.link is not None:
        return DeviceLink(profile.link.bytes_per_s, profile.link.latency_s)
    simulated = {device.name for device in fleet.simulate}
    here = fleet.broker == EMBEDDED or hello.device in simulated
    return LOCAL if here else UNKNOWN
