"""The links between the devices of a run and its broker, as far as they are known."""

from __future__ import annotations

import math
import shutil
from typing import Final, NamedTuple

from edgetrain.fleet_config import EMBEDDED, FleetConfig
from edgetrain.planner.timeline_case import NETWORKS, Network
from edgetrain.wire.frame import DEFAULT_CHUNK_BYTES
from edgetrain.wire.hello import Hello


class DeviceLink(NamedTuple):
    """One device's way to the broker: bytes a second either way, seconds of one leg."""

    bytes_per_s: float
    latency_s: float


LOCAL: Final = DeviceLink(math.inf, 0.0)  # what the broker itself takes is `Network`'s
UNKNOWN: Final = DeviceLink(12.5e6, 1e-3)  # no more than 100 Mbit/s is assumed


def link_of(hello: Hello, fleet: FleetConfig) -> DeviceLink:
    """A device's link: as simulated or measured, else what is usual for such a fleet."""
    profile = hello.profile
    for device in fleet.simulate:
        if device.name == hello.device:
            return DeviceLink(device.link_bytes_per_s, device.latency_s)
    if profile is not None and profile.link is not None:
        return DeviceLink(profile.link.bytes_per_s, profile.link.latency_s)
    return LOCAL if fleet.broker == EMBEDDED else UNKNOWN


def network_of(fleet: FleetConfig) -> Network:
    """What a message takes beside links: of the broker that the run has."""
    own = fleet.broker == EMBEDDED and shutil.which("mosquitto") is None
    network = NETWORKS["iotcore" if own else "mosquitto"]
    return Network(
        network.topology,
        chunk_bytes=DEFAULT_CHUNK_BYTES,
        hop_s=network.hop_s,
        hop_s_per_byte=network.hop_s_per_byte,
        op_s=network.op_s,
    )
