"""Which codec holds a step's time while the bandwidth changes."""

from __future__ import annotations

from typing import Final

from edgetrain.codec_spec import CodecSpec

LADDER: Final = tuple(CodecSpec(name) for name in ("raw", "bf16", "int8", "int4"))
SLACK: Final = 0.05  # of the target; within it, a step is in time
LATE_STEPS: Final = 2  # in a row, before fewer bytes are sent: one may be a hiccup
PATIENCE: Final = 8  # steps in time before more bytes are tried
MOST_PATIENCE: Final = 512


class AdaptiveRate:
    """Climbs down a ladder of codecs when steps are late, and up again when they are not.

    Two late steps in a row and the next codec is half as long. After eight steps in time
    the longer one is tried; if steps are late again at once, it goes back and waits twice
    as long before it tries again. What comes out depends on what goes in and nothing else.

    Args:
        target_s: that a step should take at the most.
    """

    def __init__(self, target_s: float) -> None:
        self._limit_s = target_s * (1 + SLACK)
        self._rung = 0
        self._late = 0
        self._in_time = 0
        self._patience = PATIENCE
        self._trying = False

    @property
    def codec(self) -> CodecSpec:
        """What to send in now."""
        return LADDER[self._rung]

    def observe(self, step_s: float) -> None:
        """A step took so long."""
        if step_s > self._limit_s:
            self._in_time = 0
            self._late += 1
            if self._late >= LATE_STEPS and self._rung + 1 < len(LADDER):
                self._climb_down()
            return
        self._late = 0
        self._in_time += 1
        if self._trying and self._in_time >= PATIENCE:  # the longer codec will do
            self._trying, self._patience = False, PATIENCE
        if self._in_time >= self._patience and self._rung:
            self._rung -= 1
            self._in_time, self._trying = 0, True

    def _climb_down(self) -> None:
        if self._trying:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._trying = False
        self._rung += 1
        self._late = 0
