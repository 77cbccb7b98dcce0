"""What this process holds in memory, by Linux's own books."""

from __future__ import annotations

import gc
from pathlib import Path

PROCESS = Path("/proc/self")
RESET_PEAK = "5"


def now_bytes() -> int:
    """Resident at present, garbage collected first."""
    gc.collect()
    return _read("VmRSS:")


def peak_bytes() -> int:
    """The most that was resident at once since `forget_peak`."""
    return _read("VmHWM:")


def forget_peak() -> None:
    (PROCESS / "clear_refs").write_text(RESET_PEAK, "ascii")


def _read(field: str) -> int:
    lines = (PROCESS / "status").read_text("ascii").splitlines()
    line = next(line for line in lines if line.startswith(field))
    return 1024 * int(line.split()[1])
