"""The receiving end of one stream of frames: what has come, and how much more may come."""

from __future__ import annotations

import math
from typing import Final

from edgetrain.errors import FlowError
from edgetrain.wire.frame import Address, Frame
from edgetrain.wire.receipt import (
    FRAMES_AHEAD,
    LEAST_WINDOW_BYTES,
    Receipt,
    charge_bytes,
)

DEFAULT_RECEIVE_BYTES: Final = 8 << 20

# A receipt is small beside what it acknowledges, and no sender waits for one until its
# window is full: so several frames share one.
DELAY_S: Final = 0.05
GAP_DELAY_S: Final = 0.002  # something is missing, or comes again: the sender should know


class Receiver:
    """Tells new frames from those that come again, and keeps the sender within its window.

    A message is charged to the window when its first frame comes and released when it was
    taken. One message may come whatever its size. The sender reckons in the same way and
    begins no message that does not fit, so one that does is false or broken.

    It keeps no clock: every call is told the time.

    Attributes:
        due_s: when a receipt is to be sent; infinite when none is.

    Args:
        name: run, epoch and origin of the stream.
        window_bytes: at least `LEAST_WINDOW_BYTES`.
    """

    def __init__(
        self, name: tuple[int, int, int], window_bytes: int = DEFAULT_RECEIVE_BYTES
    ) -> None:
        if window_bytes < LEAST_WINDOW_BYTES:
            raise ValueError(f"window of {window_bytes} B, least {LEAST_WINDOW_BYTES} B")
        self.due_s = math.inf
        self._name = name
        self._window_bytes = window_bytes
        self._low = 0
        self._beyond: set[int] = set()
        self._turn = 0
        self._charged: dict[int, tuple[Address, int]] = {}
        self._charged_bytes = 0
        self._consumed_bytes = 0
        self._news_bytes = 0
        self._window_told = False  # till then the sender reckons with the least one

    @property
    def charged_bytes(self) -> int:
        """Of messages that are coming or wait to be taken."""
        return self._charged_bytes

    def accept(self, frame: Frame, now_s: float) -> bool:
        """Note a frame; False when it came before.

        Raises:
            FlowError: the sender goes beyond its window.
        """
        ticket = frame.ticket
        if ticket.sequence < self._low or ticket.sequence in self._beyond:
            self._turn = max(self._turn, ticket.turn + 1)
            self._hasten(now_s + GAP_DELAY_S)
            return False
        if ticket.sequence >= self._low + FRAMES_AHEAD:
            raise FlowError(
                f"frame {ticket.sequence} came while {self._low} is missing: more than"
                f" {FRAMES_AHEAD} under way"
            )
        self._charge(frame)
        self._turn = max(self._turn, ticket.turn + 1)
        self._beyond.add(ticket.sequence)
        while self._low in self._beyond:
            self._beyond.remove(self._low)
            self._low += 1
        soon = self._beyond or not self._window_told
        due_s = now_s + (GAP_DELAY_S if soon else DELAY_S)
        self._tell(frame.body.nbytes, due_s, now_s)
        return True

    def consume(self, message: int, now_s: float) -> None:
        """Note that a message was taken."""
        _, charge = self._charged.pop(message)
        self._charged_bytes -= charge
        self._consumed_bytes += charge
        self._tell(charge, now_s + DELAY_S, now_s)

    def asked(self, now_s: float) -> None:
        """Send a receipt at once."""
        self._hasten(now_s)

    def receipt(self) -> Receipt:
        """The present state, to be sent; nothing is due afterwards."""
        self.due_s = math.inf
        self._news_bytes = 0
        self._window_told = True
        counts = (self._low, self._turn, self._consumed_bytes, self._window_bytes)
        return Receipt(*self._name, *counts, self._bitmap())

    def _charge(self, frame: Frame) -> None:
        message, charge = (
            frame.ticket.message,
            charge_bytes(frame.total_bytes, frame.chunks),
        )
        mine = (frame.address, charge)
        if message in self._charged:
            if self._charged[message] != mine:
                raise FlowError(f"{frame.address} bears the number of another message")
            return
        if self._charged and self._charged_bytes + charge > self._window_bytes:
            raise FlowError(
                f"{frame.address} of {frame.total_bytes} B came while"
                f" {self._charged_bytes} B were not taken yet; the window is"
                f" {self._window_bytes} B"
            )
        self._charged[message] = mine
        self._charged_bytes += charge

    def _bitmap(self) -> bytes:
        if not self._beyond:
            return b""
        bits = 0
        for sequence in self._beyond:
            bits |= 1 << (sequence - self._low)
        return bits.to_bytes(-(-bits.bit_length() // 8), "little")

    def _tell(self, nbytes: int, due_s: float, now_s: float) -> None:
        """Have a receipt due: now, if there is much to tell."""
        self._news_bytes += nbytes
        much = self._news_bytes >= self._window_bytes // 4
        self._hasten(now_s if much else due_s)

    def _hasten(self, due_s: float) -> None:
        self.due_s = min(self.due_s, due_s)
