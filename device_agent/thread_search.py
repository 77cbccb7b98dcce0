"""Finds the engine's best number of threads, and whether they should spin, by trying.

Source: Hasabnis, Auto-tuning TensorFlow threading model for CPU backend (2018), in that
the settings are searched. Ours: all of a device's few settings in turn, and the fewest
threads where more gain next to nothing, as a device has other work too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from device_agent.probe_set import ProbeSet
from device_agent.timing import Clock, TimedStage, typical
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine

TRIALS: Final = (("conv3x3 64 8x8", 8), ("gemm 512", 32), ("tokens 64x128", 8))
ROUNDS: Final = 9
WORTH: Final = 1.03  # of the best time: more threads must gain more than that


class Threading(NamedTuple):
    """Settings of the engine; in order of what they cost the rest of the device."""

    threads: int
    spinning: bool

    def __str__(self) -> str:
        many = "thread" if self.threads == 1 else "threads"
        return f"{self.threads} {many}{', spinning' if self.spinning else ''}"


def candidates(cores: int) -> list[Threading]:
    """1, 2, 4 and so on up to all cores; one thread has nobody to wait for."""
    counts = {cores, *(1 << n for n in range(cores.bit_length()) if 1 << n <= cores)}
    return sorted(Threading(n, spins) for n in counts for spins in {False, n > 1})


def fewest(seconds: Mapping[Threading, float]) -> Threading:
    """The cheapest settings within a few per cent of the best.

    Args:
        seconds: of the same work under each.
    """
    best_s = min(seconds.values())
    return min(setting for setting, s in seconds.items() if s <= WORTH * best_s)


def search(
    probes: ProbeSet,
    settings: Sequence[Threading],
    *,
    clock: Clock,
    advance: Callable[[], None],
) -> dict[Threading, float]:
    """Seconds of a pass under each of the settings, relative to the best: 1 or more.

    Each is loaded once and they take turns, so that what else the device does meets all of
    them; of two runs in a row the second counts, as threads of the one before may still
    spin in the first. Of several graphs the geometric mean.

    Args:
        probes: the graphs.
        settings: to try.
        clock: seconds, monotonic.
        advance: called after every round of every graph.
    """
    logs: dict[Threading, list[float]] = {setting: [] for setting in settings}
    for name, batch in TRIALS:
        case = next(c for c in probes.cases if (c.name, c.batch) == (name, batch))
        stages = {}
        for setting in settings:
            engine = OnnxRuntimeEngine(**setting._asdict())
            stages[setting] = TimedStage(probes.bundle(case, engine.block), engine, clock)
        times: dict[Threading, list[float]] = {setting: [] for setting in settings}
        for _ in range(ROUNDS):
            for setting, stage in stages.items():
                stage.run()
                times[setting].append(sum(stage.run()))
            advance()
        for setting, found in times.items():
            logs[setting].append(math.log(typical(found)))
    means = {setting: math.fsum(found) / len(TRIALS) for setting, found in logs.items()}
    least = min(means.values())
    return {setting: math.exp(mean - least) for setting, mean in means.items()}
