"""The process's heap."""

from __future__ import annotations

import ctypes
import os


def give_back() -> None:
    """Return freed memory to the system, where the C library offers it (glibc does).

    Loading a graph builds and drops many small objects; what they leave behind is too
    scattered for the tensors that follow, and on a small device it would stay for good.
    """
    if os.name == "posix":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
