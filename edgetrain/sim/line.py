"""One direction of a shaped link: when each message leaves and when it arrives."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np

from edgetrain.conditions import Conditions
from edgetrain.sim.timetable import Timetable
from edgetrain.wire.topics import Channel

# Linux waits for a round trip and at least this long before it sends again.
RETRANSMIT_S: Final = 0.2
MAX_DOUBLINGS: Final = 6

_T = TypeVar("_T")


class _Queued(NamedTuple, Generic[_T]):
    since_s: float
    nbytes: int
    item: _T


class _Flying(NamedTuple, Generic[_T]):
    due_s: float
    nbytes: int
    item: _T


@dataclass(slots=True)
class _Lane(Generic[_T]):
    """What goes over one TCP connection: it arrives in the order it was put in."""

    queued: deque[_Queued[_T]] = field(default_factory=deque)
    flying: deque[_Flying[_T]] = field(default_factory=deque)
    last_due_s: float = -math.inf


class Line(Generic[_T]):
    """Messages on a link, one at a time, then under way for its latency.

    A message takes the link for its bytes at the link's rate. When the link is free, a
    control message or a receipt goes before tensors, so it waits for one frame at most. A
    message that needs a retransmission comes a timeout later, and what is behind it on its
    channel waits for it, as over TCP.

    It keeps no clock: every call is told the time, which never goes back. So what it does
    depends on the times and the seed alone.

    Source: the timeout is RFC 6298's, doubled for each further loss, with the round trip
    known and Linux' least of 200 ms; fast retransmission, which comes sooner in a busy
    stream, is left out.
    """

    def __init__(
        self, conditions: Conditions, timetable: Timetable, random: np.random.Generator
    ) -> None:
        self._conditions = conditions
        self._timetable = timetable
        self._random = random
        self._free_s = -math.inf
        self._lanes: dict[Channel, _Lane[_T]] = {channel: _Lane() for channel in Channel}

    @property
    def empty(self) -> bool:
        return not any(lane.queued or lane.flying for lane in self._lanes.values())

    def put(self, now_s: float, channel: Channel, item: _T, nbytes: int) -> None:
        """Queue a message before the link."""
        self._lanes[channel].queued.append(_Queued(now_s, nbytes, item))

    def due(self, now_s: float) -> list[tuple[_T, int]]:
        """The messages that have arrived, and their sizes in bytes."""
        while (start_s := self._next_start_s()) <= now_s:
            self._send(start_s)
        arrived: list[_Flying[_T]] = []
        for lane in self._lanes.values():
            while lane.flying and lane.flying[0].due_s <= now_s:
                arrived.append(lane.flying.popleft())
        arrived.sort(key=lambda flying: flying.due_s)
        return [(flying.item, flying.nbytes) for flying in arrived]

    def next_s(self) -> float:
        """When there is something to do; infinite when the line is empty."""
        dues = [lane.flying[0].due_s for lane in self._lanes.values() if lane.flying]
        return min((self._next_start_s(), *dues))

    def _next_start_s(self) -> float:
        heads = [lane.queued[0].since_s for lane in self._lanes.values() if lane.queued]
        return max(self._free_s, min(heads)) if heads else math.inf

    def _send(self, start_s: float) -> None:
        """Put the next message on the link: of those that are there, control first."""
        for channel in (Channel.CONTROL, Channel.FLOW, Channel.DATA):
            lane = self._lanes[channel]
            if lane.queued and lane.queued[0].since_s <= start_s:
                break
        message = lane.queued.popleft()
        self._free_s = self._timetable.sent_s(start_s, message.nbytes)
        due_s = max(self._free_s + self._delay_s(), lane.last_due_s)
        lane.last_due_s = self._timetable.sent_s(due_s, 0)
        lane.flying.append(_Flying(lane.last_due_s, message.nbytes, message.item))

    def _delay_s(self) -> float:
        c = self._conditions
        delay_s = c.latency_s + (c.jitter_s * self._random.random() if c.jitter_s else 0.0)
        timeout_s = 2 * c.latency_s + RETRANSMIT_S
        for doublings in range(MAX_DOUBLINGS if c.loss else 0):
            if self._random.random() >= c.loss:
                break
            delay_s += timeout_s * 2**doublings
        return delay_s
