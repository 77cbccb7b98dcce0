"""What this device can do: its memory, its cores, and a short measurement of speed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import numpy as np

MEMINFO: Final = Path("/proc/meminfo")
SIDE: Final = 96  # small enough that BLAS uses one thread
REPEATS: Final = 200
SHARE_OF_FREE: Final = 0.5


def free_memory_bytes() -> int:
    """Half of what the system could give to a new process now."""
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        free = int(available.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(free * SHARE_OF_FREE)


def cores() -> int:
    return os.cpu_count() or 1


def flop_per_s() -> float:
    """Speed of small matrix products on one thread, the best of a few tries.

    Good enough to lay out a first plan; the plan is corrected by measured stage times.
    """
    a = np.full((SIDE, SIDE), 0.5, np.float32)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(REPEATS):
            np.matmul(a, a)
        best = max(best, 2 * SIDE**3 * REPEATS / (time.perf_counter() - start))
    return best
