"""The real files that `scripts/fetch_inputs.py` puts into the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "inputs"


def cached(name: str) -> Path:
    """Path of a fetched input; skips the test where it was not fetched."""
    path = CACHE / name
    if not path.exists():
        pytest.skip(f"{name} is not in the cache: run python scripts/fetch_inputs.py")
    return path
