"""The document that `try_models.py` writes: what became of each real model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trial import Outcome


def write_report(outcomes: Iterable[Outcome], path: Path) -> None:
    print(path, len(list(outcomes)))
