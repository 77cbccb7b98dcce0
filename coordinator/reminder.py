"""Says again what devices were told last, when nothing is heard of them.

A broker that crashes may have acknowledged a command and never delivered it. Commands
are idempotent, and a device that hears one twice reports again what it reported last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from coordinator.fleet import Event, Fleet
from edgetrain.wire.messages import Command, Evaluate, NormTotal, Train

SILENCE_S: Final = 4.0
_KEPT: Final = 3
_REPEATED: Final = (Train, Evaluate, NormTotal)  # what is fetched may be large


class Reminder:
    """Of one run.

    Args:
        fleet: is listened to.
        send: gives a command to all devices of the run.
        silence_s: after so long without an event the last commands are sent again.
    """

    def __init__(
        self, fleet: Fleet, send: Callable[[Command], None], *, silence_s: float = SILENCE_S
    ) -> None:
        self._fleet = fleet
        self._send = send
        self._silence_s = silence_s
        self._last: deque[Command] = deque(maxlen=_KEPT)

    def command(self, command: Command) -> None:
        """Send, and remember for a while."""
        if isinstance(command, _REPEATED):
            self._last.append(command)
        self._send(command)

    def forget(self) -> None:
        """Another plan is in force."""
        self._last.clear()

    def event(self, timeout_s: float) -> Event | None:
        """The next thing that happens; None when nothing does in time."""
        left_s = timeout_s
        while left_s > 0:
            wait_s = min(self._silence_s, left_s)
            event = self._fleet.event(wait_s)
            if event is not None:
                return event
            left_s -= wait_s
            for command in tuple(self._last):
                self._send(command)
        return None
