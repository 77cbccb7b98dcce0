"""Ctrl-C: once to stop cleanly, twice to abort."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_to(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on Ctrl-C and on SIGTERM, in the main thread, while in the context."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        signal.signal(number, lambda *_: act())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopRequest:
    """Turns a first signal into a wish to stop, which is asked for between steps.

    Before anyone has asked there is nothing to keep, so even the first signal aborts, as
    every second one does.

    Args:
        say: tells the user what happens.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._asked = False
        self._requested = False

    def stopped(self) -> bool:
        """Whether to stop now."""
        self._asked = True
        return self._requested

    def request(self) -> None:
        """A signal came.

        Raises:
            KeyboardInterrupt: to abort.
        """
        if self._requested or not self._asked:
            raise KeyboardInterrupt
        self._requested = True
        self._say("stopping after this step; the weights so far are kept (again: abort)")
