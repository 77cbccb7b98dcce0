"""The links of a simulated network: who waits for whom, and when messages arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from edgetrain.planner.course import Course
from edgetrain.planner.timeline_case import Case, TimedDevice
from edgetrain.planner.timeline_nodes import START

# Linux waits for a round trip and at least this long before it sends again.
RETRANSMIT_S: Final = 0.2
MAX_DOUBLINGS: Final = 6
BROKER: Final = "broker"
UP: Final = "uplink"
DOWN: Final = "downlink"


class Passage(NamedTuple):
    """One message over one link: when it holds the link, and when its ends arrive."""

    start_s: float
    end_s: float
    first_due_s: float
    last_due_s: float


@dataclass(slots=True)
class Link:
    """One direction of a link: one message at a time, in the order they come.

    A message holds it for its bytes at the link's rate, then takes its latency. What needs
    a retransmission comes a timeout later, and what is behind it waits, as over TCP.

    Source: the timeout is RFC 6298's, doubled for each further loss, with the round trip
    known and Linux' least of 200 ms; fast retransmission, which comes sooner in a busy
    stream, is left out.
    """

    device: str
    way: str
    course: Course
    number: int = 0
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    random: np.random.Generator | None = None
    free_s: float = 0.0
    last_due_s: float = -math.inf
    last_node: int = START
    bytes: float = 0.0

    @property
    def name(self) -> str:
        """As people read it: ``pi uplink``."""
        return BROKER if self.way == BROKER else f"{self.device} {self.way}"

    def carry(
        self, ready_s: float, nbytes: float, chunk_bytes: float, whole_s: float
    ) -> Passage:
        """Take a message.

        Args:
            ready_s: from when it can pass without a gap.
            nbytes: of it.
            chunk_bytes: of what the receiver can pass on; 0: any first byte.
            whole_s: when all of it has come to this link.
        """
        start_s = max(ready_s, self.free_s)
        end_s = self.course.end_s(start_s, nbytes)
        if whole_s > start_s:
            end_s = max(end_s, self.course.end_s(whole_s, chunk_bytes))
        self.free_s = end_s
        self.bytes += nbytes
        first_s = self.course.end_s(start_s, chunk_bytes)
        first_due_s, due_s = first_s + self.latency_s, end_s + self.latency_s
        if self.random is not None:
            delays_s = self._delays_s(self.random, nbytes, chunk_bytes)
            first_due_s, due_s = self._late(delays_s, (start_s, end_s), chunk_bytes)
        self.last_due_s = max(self.last_due_s, self.course.end_s(due_s, 0.0))
        return Passage(start_s, end_s, min(first_due_s, self.last_due_s), self.last_due_s)

    def _late(
        self, delays_s: Sequence[float], span: tuple[float, float], chunk_bytes: float
    ) -> tuple[float, float]:
        """When the first and the last chunk arrive, given how late each is."""
        start_s, end_s = span
        first_due_s = due_s = self.last_due_s
        for chunk, delay_s in enumerate(delays_s, 1):
            sent_s = end_s
            if chunk < len(delays_s):
                sent_s = min(end_s, self.course.end_s(start_s, chunk * chunk_bytes))
            due_s = max(due_s, sent_s + delay_s)
            if chunk == 1:
                first_due_s = due_s
        return first_due_s, due_s

    def _delays_s(
        self, random: np.random.Generator, nbytes: float, chunk_bytes: float
    ) -> list[float]:
        chunks = max(1, math.ceil(nbytes / chunk_bytes)) if chunk_bytes else 1
        return [self._delay_s(random) for _ in range(chunks)]

    def _delay_s(self, random: np.random.Generator) -> float:
        delay_s = self.latency_s + self.jitter_s * random.random()
        timeout_s = 2 * self.latency_s + RETRANSMIT_S
        for doublings in range(MAX_DOUBLINGS if self.loss else 0):
            if random.random() >= self.loss:
                break
            delay_s += timeout_s * 2**doublings
        return delay_s


class Links:
    """All links of a case, and the way from one device to another.

    The coordinator has the number after the last device's.

    Attributes:
        all: by their numbers.
    """

    def __init__(self, case: Case) -> None:
        ends = (*case.devices, case.coordinator)
        through = case.network.topology == BROKER
        self._up = [_link(device, UP, i, case.seed) for i, device in enumerate(ends)]
        self._down = [
            _link(device, DOWN, i, case.seed, late=through) for i, device in enumerate(ends)
        ]
        self._middle: tuple[Link, ...] = ()
        if through and case.network.broker_bytes_per_s < math.inf:
            self._middle = (Link(BROKER, BROKER, Course(case.network.broker_bytes_per_s)),)

        self.all = (*self._up, *self._down, *self._middle)
        for number, link in enumerate(self.all):
            link.number = number

    def route(self, source: int, to: int) -> tuple[Link, ...]:
        """Links from one device to another, in order; none within a device."""
        return () if source == to else (self._up[source], *self._middle, self._down[to])


def _link(
    device: TimedDevice, way: str, index: int, seed: int, *, late: bool = True
) -> Link:
    up = way == UP
    first = device.uplink_bytes_per_s if up else device.downlink_bytes_per_s
    course = Course(first, device.link_rates)
    link = Link(device.name, way, course)
    if not late:
        return link
    link.latency_s = device.latency_s
    if device.jitter_s or device.loss:
        link.jitter_s, link.loss = device.jitter_s, device.loss
        key = np.random.SeedSequence([seed, index, int(up)])
        link.random = np.random.Generator(np.random.PCG64(key))
    return link
