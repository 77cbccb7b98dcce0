"""A device's presence: what the coordinator knows of it before it gives it a stage."""

from __future__ import annotations

import msgspec

from edgetrain.abilities import ABILITIES
from edgetrain.device_profile import DeviceProfile
from edgetrain.tensors import TensorSpec


class DatasetInfo(msgspec.Struct, frozen=True):
    """What the coordinator may know of samples that stay on a device: their shape.

    Attributes:
        inputs: without the leading extent of samples.
        labels: likewise; None if there are none.
        train_samples, eval_samples: how many; 0 evaluation samples if there are none.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    labels: TensorSpec | None
    train_samples: int
    eval_samples: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A device's presence: who it is and what it can do.

    Attributes:
        session: of this start of the agent; two sessions under one name are two agents.
        gradient: ``"auto"``, or the one mode the device accepts.
        memory_bytes: what it lends to training.
        flop_per_s: measured by a short probe.
        block: channels in a block of the engine's own layout; 0: it has none.
        runs: what the engine runs beside plain forwards; of `ABILITIES`.
        signed_by: fingerprint of the one key whose commands it takes; empty: any sender's.
        profile: measured before, at the speed the device is held back to; a few kilobytes.
    """

    device: str
    session: str
    version: str
    engine: str
    providers: tuple[str, ...]
    gradient: str
    memory_bytes: int
    flop_per_s: float
    cores: int
    datasets: tuple[DatasetInfo, ...] = ()
    block: int = 0
    runs: tuple[str, ...] = ABILITIES
    profile: DeviceProfile | None = None
    signed_by: str = ""
