"""Whose the process's one shared allocator of ONNX Runtime is.

ONNX Runtime lets a process register one allocator for sessions to share, for good. The
compiler wants it bounded, the engine wants it without a bound. Where both run in one
process, as in tests, the first that asks has it and the other does without.
"""

from __future__ import annotations

from typing import Final

_CLAIMS: Final[dict[str, str]] = {}


def claim(owner: str) -> bool:
    """Whether the allocator is the caller's."""
    return _CLAIMS.setdefault("owner", owner) == owner
