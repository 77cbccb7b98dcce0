"""Whose the process's one shared allocator of ONNX Runtime is.

ONNX Runtime lets a process register one allocator for sessions to share, for good. The
compiler wants it bounded, the engine wants it without a bound. Where both run in one
process, as in tests, the first that asks has it and the other does without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final


class Arena:
    """The allocator of one process, and who has it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = ""
        self._registered = False

    def claim(self, owner: str, register: Callable[[], None]) -> bool:
        """Whether the allocator is the caller's; it is registered if so.

        Args:
            owner: who asks; the first ever to ask has it.
            register: does so for the owner, once: if it raises, so does this, and the
                owner's next claim tries again.
        """
        with self._lock:
            self._owner = self._owner or owner
            if self._owner != owner:
                return False
            if not self._registered:
                register()
                self._registered = True
            return True


ARENA: Final = Arena()


def settings(max_bytes: int = 0) -> Mapping[str, int]:
    """ONNX Runtime's, of an arena that grows by what is asked for; 0: without a bound."""
    as_requested = 1
    return {"max_mem": max_bytes, "arena_extend_strategy": as_requested}
