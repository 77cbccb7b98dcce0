"""Puts together what an agent works with: engine, data sets, and its own description."""

from __future__ import annotations

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
from edgetrain.runtime.engines.abilities import abilities
from edgetrain.runtime.engines.base import Engine
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.sim.device import NarrowedEngine, SlowedEngine
from edgetrain.sim.timetable import Timetable
from edgetrain.train_config import AUTO
from edgetrain.wire.hello import Hello


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device lends to training.

    Attributes:
        threads: for the inference engine.
        memory_bytes: for its stages; None: half of what is free now.
        gradient: the one mode it accepts, or ``"auto"``.
        runs: of `ABILITIES`, those it is held back to.
        conditions: that it is simulated under.
    """

    threads: int = 1
    memory_bytes: int | None = None
    gradient: str = AUTO
    runs: tuple[str, ...] = ABILITIES
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
    plain = OnnxRuntimeEngine(threads=limits.threads)
    conditions = limits.conditions
    engine: Engine = plain
    if conditions.slow_the_engine:
        course = timetable or Timetable(conditions)
        engine = SlowedEngine(
            plain, lambda: course.speed(time.monotonic()), paced=conditions.paced
        )
    if set(limits.runs) != set(ABILITIES):
        engine = NarrowedEngine(engine, limits.runs)
    hello = Hello(
        device=name,
        session=secrets.token_hex(8),
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
    )
    return Equipment(hello, engine, loaded)
