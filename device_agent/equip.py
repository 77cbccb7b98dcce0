"""Puts together what an agent works with: engine, data sets, and its own description."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from device_agent.agent import Equipment
from device_agent.config import DatasetConfig
from device_agent.data import open_datasets
from device_agent.probe import cores, flop_per_s, free_memory_bytes
from edgetrain.abilities import ABILITIES
from edgetrain.conditions import Conditions
from edgetrain.device_profile import DeviceProfile
from edgetrain.runtime.engines.abilities import abilities
from edgetrain.runtime.engines.base import Engine
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.sim.device import NarrowedEngine, SlowedEngine
from edgetrain.sim.timetable import Timetable
from edgetrain.train_config import AUTO
from edgetrain.wire.hello import Hello

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device lends to training.

    Attributes:
        threads: for the inference engine; None: as the profile found best, 1 without one.
        memory_bytes: for its stages; None: half of what is free now.
        gradient: the one mode it accepts, or ``"auto"``.
        runs: of `ABILITIES`, those it is held back to.
        profile: what was measured of it at its full speed.
        conditions: that it is simulated under.
    """

    threads: int | None = None
    memory_bytes: int | None = None
    gradient: str = AUTO
    runs: tuple[str, ...] = ABILITIES
    profile: DeviceProfile | None = None
    conditions: Conditions = field(default_factory=Conditions)


def equip(
    name: str,
    limits: Limits,
    datasets: Mapping[str, DatasetConfig] | None = None,
    timetable: Timetable | None = None,
) -> Equipment:
    """Load the engine and the data sets, and measure the device.

    Args:
        name: of the device.
        limits: what it lends.
        datasets: that it has.
        timetable: of `limits.conditions`, if its link goes by the same one.

    Raises:
        DataError: a data set's file is missing or malformed.
    """
    loaded = open_datasets(datasets or {})
    plain = _engine(limits)
    conditions = limits.conditions
    engine: Engine = plain
    if conditions.slow_the_engine:
        course = timetable or Timetable(conditions)
        engine = SlowedEngine(
            plain,
            lambda: course.speed(time.monotonic()),
            paced=conditions.paced,
            work_clock=time.thread_time if plain.threads == 1 else None,
        )
    if set(limits.runs) != set(ABILITIES):
        engine = NarrowedEngine(engine, limits.runs)
    hello = Hello(
        device=name,
        session=secrets.token_hex(16),
        version=metadata.version("edgetrain"),
        engine=f"{plain.name} {plain.version}",
        providers=plain.providers,
        gradient=limits.gradient,
        memory_bytes=limits.memory_bytes or free_memory_bytes(),
        flop_per_s=flop_per_s() * conditions.speed,
        cores=cores(),
        datasets=tuple(dataset.info for dataset in loaded.values()),
        block=plain.block,
        runs=abilities(engine),
        profile=_announced(limits, plain),
    )
    return Equipment(hello, engine, loaded)


def _engine(limits: Limits) -> OnnxRuntimeEngine:
    profile = limits.profile
    threads = limits.threads or (profile.threads if profile else 1)
    spinning = profile is not None and profile.spinning and threads == profile.threads
    return OnnxRuntimeEngine(threads=threads, spinning=spinning)


def _announced(limits: Limits, engine: OnnxRuntimeEngine) -> DeviceProfile | None:
    """The profile at the speed the device is held back to, if it is of this device."""
    profile = limits.profile
    if profile is None:
        return None
    here = (f"{engine.name} {engine.version}", cores(), engine.block, engine.threads)
    there = (profile.engine, profile.cores, profile.block, profile.threads)
    if here != there:
        log.warning(
            "the profile was measured with %s, %d cores, blocks of %d and %d threads; here"
            " are %s, %d, %d and %d: it is not announced, so the plan goes by a short test."
            " Measure again with `edgetrain-agent probe --out FILE`",
            *there,
            *here,
        )
        return None
    return profile.slowed(limits.conditions.speed)
