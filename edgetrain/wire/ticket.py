"""Which frame of which stream a frame is."""

from __future__ import annotations

from typing import Final, NamedTuple


class Ticket(NamedTuple):
    """A frame's place in the stream from one party to another, of one run and epoch.

    Attributes:
        message: number of its message, in the order they were begun.
        sequence: its own number; when sent again it keeps it.
        turn: number of this sending.
        origin: a random number, the same for the whole stream: a sender that starts anew
            starts another stream.
    """

    message: int = 0
    sequence: int = 0
    turn: int = 0
    origin: int = 0


NO_TICKET: Final = Ticket()
