"""A bound on the bytes that were handed over and have not left the process."""

from __future__ import annotations

import threading

from edgetrain.errors import TransportError


class SendWindow:
    """Counts bytes in and out, and makes senders wait while too many are inside.

    The count may pass the limit by one message for each thread that sends.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._paused = False
        self._failure: str | None = None
        self._changed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def wait(self) -> None:
        """Wait for room.

        Raises:
            TransportError: the window was closed; its message is the reason given.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._failure is not None
                    or (not self._paused and self._held_bytes < self._limit_bytes)
                )
            )
            if self._failure is not None:
                raise TransportError(self._failure)

    def drain(self, timeout_s: float) -> None:
        """Wait until all has left, or the window is closed, or so long."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self._held_bytes == 0, timeout_s
            )

    def add(self, nbytes: int) -> None:
        with self._changed:
            self._held_bytes += nbytes

    def remove(self, nbytes: int) -> None:
        """Never below zero: bytes added before a `resume` may leave after it."""
        with self._changed:
            self._held_bytes = max(0, self._held_bytes - nbytes)
            if self._held_bytes < self._limit_bytes:
                self._changed.notify_all()

    def pause(self) -> None:
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Start again with an empty window."""
        with self._changed:
            self._paused = False
            self._held_bytes = 0
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Let every sender fail, now and later; the first reason stays."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()
