"""What the doctor says of one thing it looked at."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    GOOD = "good"
    NOTE = "note"  # worth knowing, nothing to do
    CHANGE = "change"


class Finding(msgspec.Struct, frozen=True):
    """One thing.

    Attributes:
        check: what was looked at.
        found: what is there.
        advice: what to do about it, if anything.
        stops: nothing more can be found out.
    """

    check: str
    verdict: Verdict
    found: str
    advice: str = ""
    stops: bool = False
