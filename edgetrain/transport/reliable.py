"""The sending end of one stream of frames: what may go, what must go again, and when."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from edgetrain.errors import FlowError
from edgetrain.wire.frame import Parcel
from edgetrain.wire.receipt import (
    FRAMES_AHEAD,
    LEAST_WINDOW_BYTES,
    Ask,
    Receipt,
    charge_bytes,
)
from edgetrain.wire.ticket import Ticket

FIRST_TIMEOUT_S: Final = 1.0
LEAST_TIMEOUT_S: Final = 1.0  # as there: well above the hiccups of a busy device
LONGEST_TIMEOUT_S: Final = 5.0

# What is needed soonest comes first: compared in order, the smallest goes.
Urgency = tuple[int, ...]


class Piece(NamedTuple):
    """A frame to send now."""

    parcel: Parcel
    chunk: int
    ticket: Ticket


class Timeout:
    """How long to wait for a receipt.

    Source: RFC 6298, with other bounds, as a receipt is delayed by design and a link of
    ours that was down should be found up soon. Karn's rule is not needed: a receipt names
    the sending it answers.
    """

    def __init__(self) -> None:
        self._smooth_s = 0.0
        self._spread_s = 0.0
        self._doublings = 0
        self._base_s = FIRST_TIMEOUT_S

    @property
    def seconds(self) -> float:
        return min(LONGEST_TIMEOUT_S, math.ldexp(self._base_s, self._doublings))

    def measured(self, round_trip_s: float) -> None:
        if self._smooth_s == 0.0:
            self._smooth_s, self._spread_s = round_trip_s, round_trip_s / 2
        else:
            off_s = abs(self._smooth_s - round_trip_s)
            self._spread_s += (off_s - self._spread_s) / 4
            self._smooth_s += (round_trip_s - self._smooth_s) / 8
        wanted_s = self._smooth_s + 4 * self._spread_s
        self._base_s = min(LONGEST_TIMEOUT_S, max(LEAST_TIMEOUT_S, wanted_s))

    def answered(self) -> None:
        self._doublings = 0

    def expired(self) -> None:
        self._doublings = min(self._doublings + 1, 8)


@dataclass(slots=True)
class _Letter:
    """A message that is not acknowledged as a whole."""

    urgency: Urgency
    parcel: Parcel
    number: int = 0
    sent: int = 0  # chunks begun
    missing: int = 0  # chunks not acknowledged

    def __lt__(self, other: _Letter) -> bool:
        return self.urgency < other.urgency


@dataclass(slots=True)
class _Flight:
    """A frame that is not acknowledged."""

    letter: _Letter
    chunk: int
    turn: int
    sent_s: float


class Sender:
    """Numbers the frames of one stream, and keeps them until they are acknowledged.

    A frame is lost when the receipt names a later sending and not this one, as messages
    keep their order within a channel; or, when no receipt comes for the timeout, the oldest
    one is taken for lost, and the receipt for it tells of the others.

    It keeps no clock: every call is told the time, which never goes back.

    Attributes:
        held_bytes: bodies of the messages that are not acknowledged.
        resent: frames sent again so far.
    """

    def __init__(self, run: int, epoch: int, origin: int) -> None:
        self.held_bytes = 0
        self.resent = 0
        self._name = (run, epoch)
        self._origin = origin
        self._waiting: list[_Letter] = []  # heaps, by urgency
        self._begun: list[_Letter] = []
        self._flights: dict[int, _Flight] = {}  # by sequence, which rises
        self._lost: list[int] = []
        self._messages = self._sequence = self._turn = 0
        self._charged_bytes = self._consumed_bytes = 0
        self._window_bytes = LEAST_WINDOW_BYTES
        self._timeout = Timeout()
        self._timer_s = 0.0
        self._quiet_since_s = 0.0

    @property
    def idle(self) -> bool:
        """Nothing is waiting or under way."""
        return not (self._waiting or self._begun or self._flights)

    @property
    def due_s(self) -> float:
        """When `expire` is to be called; infinite when never."""
        return math.inf if self.idle else self._timer_s + self._timeout.seconds

    def quiet_s(self, now_s: float) -> float:
        """How long the receiver has said nothing while something waited for it."""
        return 0.0 if self.idle else now_s - self._quiet_since_s

    def offer(self, urgency: Urgency, parcel: Parcel, now_s: float) -> None:
        """Queue a message."""
        if self.idle:
            self._timer_s = self._quiet_since_s = now_s
        self.held_bytes += parcel.total_bytes
        letter = _Letter(urgency, parcel, missing=parcel.chunks)
        heapq.heappush(self._waiting, letter)

    def urgency(self) -> Urgency | None:
        """Of the frame that `next` would give; None: it would give none."""
        if self._lost:
            return self._flights[self._lost[0]].letter.urgency
        letter = self._choose()
        return None if letter is None else letter.urgency

    def next(self, now_s: float) -> Piece | None:
        """The frame to send now, if one may go."""
        if self._lost:
            return self._again(heapq.heappop(self._lost), now_s)
        letter = self._choose()
        if letter is None:
            return None
        if letter.sent == 0:
            self._begin(letter)
        chunk, sequence = letter.sent, self._sequence
        letter.sent += 1
        if letter.sent == letter.parcel.chunks:
            heapq.heappop(self._begun)
        if not self._flights:
            self._timer_s = now_s
        self._flights[sequence] = _Flight(letter, chunk, self._turn, now_s)
        ticket = Ticket(letter.number, sequence, self._turn, self._origin)
        self._sequence += 1
        self._turn += 1
        return Piece(letter.parcel, chunk, ticket)

    def hear(self, receipt: Receipt, now_s: float) -> None:
        """Take in a receipt; one that is out of date does nothing.

        Raises:
            FlowError: it acknowledges what was not sent.
        """
        if receipt.origin != self._origin:
            return
        if (
            receipt.low > self._sequence
            or receipt.turn > self._turn
            or receipt.consumed_bytes > self._charged_bytes
        ):
            raise FlowError("a receipt acknowledges what was not sent")
        self._quiet_since_s = now_s
        self._timeout.answered()
        news = receipt.consumed_bytes > self._consumed_bytes
        self._consumed_bytes = max(self._consumed_bytes, receipt.consumed_bytes)
        self._window_bytes = max(LEAST_WINDOW_BYTES, receipt.window_bytes)
        come = [sequence for sequence in self._flights if receipt.has(sequence)]
        for sequence in come:
            self._settle(self._flights.pop(sequence), receipt, now_s)
        if come or news:
            self._timer_s = now_s
        self._lost = [
            sequence
            for sequence, flight in self._flights.items()
            if flight.turn + 1 < receipt.turn or sequence in self._lost
        ]

    def expire(self, now_s: float) -> Ask | None:
        """Nothing was heard for the timeout: send the oldest frame again, or ask."""
        self._timer_s = now_s
        self._timeout.expired()
        if not self._flights:
            return Ask(*self._name)
        if not self._lost:
            self._lost.append(next(iter(self._flights)))
        return None

    def _choose(self) -> _Letter | None:
        """The most urgent message of those that have begun and may begin."""
        if self._flights and self._sequence >= next(iter(self._flights)) + FRAMES_AHEAD:
            return None
        begun = self._begun[0] if self._begun else None
        first = self._waiting[0] if self._waiting else None
        if first is None or (begun is not None and not first < begun):
            return begun
        return first if self._fits(first) else begun

    def _fits(self, letter: _Letter) -> bool:
        outstanding = self._charged_bytes - self._consumed_bytes
        return outstanding == 0 or outstanding + _charge(letter) <= self._window_bytes

    def _begin(self, letter: _Letter) -> None:
        heapq.heappop(self._waiting)
        heapq.heappush(self._begun, letter)
        letter.number = self._messages
        self._messages += 1
        self._charged_bytes += _charge(letter)

    def _again(self, sequence: int, now_s: float) -> Piece:
        flight = self._flights[sequence]
        flight.turn, flight.sent_s = self._turn, now_s
        self._turn += 1
        self.resent += 1
        number = flight.letter.number
        ticket = Ticket(number, sequence, flight.turn, self._origin)
        return Piece(flight.letter.parcel, flight.chunk, ticket)

    def _settle(self, flight: _Flight, receipt: Receipt, now_s: float) -> None:
        """Forget a frame that has come, and its message when that was the last one."""
        if flight.turn + 1 == receipt.turn:
            self._timeout.measured(now_s - flight.sent_s)
        flight.letter.missing -= 1
        if not flight.letter.missing:
            self.held_bytes -= flight.letter.parcel.total_bytes


def _charge(letter: _Letter) -> int:
    return charge_bytes(letter.parcel.total_bytes, letter.parcel.chunks)
