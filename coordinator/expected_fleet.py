"""The devices of a run before they are there: those that it simulates, as they would be."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from device_agent.equip import Limits, equip
from edgetrain.abilities import ABILITIES
from edgetrain.config import RunConfig
from edgetrain.errors import ConfigError
from edgetrain.wire.hello import Hello


def simulated_devices(config: RunConfig) -> Mapping[str, Hello]:
    """What each simulated device would announce, measured on this machine.

    Raises:
        ConfigError: the run names devices that are not simulated, or simulates none.
    """
    fleet = config.fleet
    simulated = {device.name for device in fleet.simulate}
    missing = sorted(set(fleet.names) - simulated)
    if missing or not simulated or fleet.count > len(simulated):
        which = ", ".join(missing) or f"{fleet.count} of which {len(simulated)} simulated"
        raise ConfigError(
            f"[fleet] has devices that are not simulated: {which}. Add them under [fleet]"
            " simulate, or give the broker that they are on, and start their agents"
        )
    here = equip("here", Limits()).hello
    return {
        device.name: msgspec.structs.replace(
            here,
            device=device.name,
            gradient=device.gradient,
            memory_bytes=device.memory_bytes or here.memory_bytes,
            flop_per_s=here.flop_per_s * device.speed,
            runs=tuple(word for word in ABILITIES if word in device.runs),
        )
        for device in fleet.simulate
    }
