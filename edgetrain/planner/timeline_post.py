"""Takes messages over the links of a simulated network, each in its turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from edgetrain.planner.event_clock import EventClock
from edgetrain.planner.timeline_case import Network
from edgetrain.planner.timeline_links import Link
from edgetrain.planner.timeline_nodes import Hop, Node, Record
from edgetrain.schedules.actions import Action
from edgetrain.wire.frame import HEADER_BYTES, wire_bytes


class Mail(NamedTuple):
    """What a stage waits for: a kind of tensor, of one microbatch or of the whole step."""

    kind: str
    step: int
    microbatch: int | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor on its way.

    Attributes:
        action: that it is for.
        route: links in order; none if it stays on its device.
        deliver: is told the node that it arrived by.
    """

    action: Action
    mail: Mail
    hop: Hop
    nbytes: float
    route: tuple[Link, ...]
    deliver: Callable[[int], None]


class Post:
    """Carries messages.

    A link takes them in the order in which they could begin to pass without a gap. On a
    later link that is so late that the last byte, which comes at the pace of the slowest
    link before, does not have to be waited for: a fast link is held by a message from a
    slow one for no longer than its bytes take.
    """

    def __init__(self, clock: EventClock, network: Network, record: Record) -> None:
        self._clock = clock
        self._network = network
        self._record = record

    def send(self, message: Message, cause: int) -> None:
        """Put a message on its way now."""
        if message.route:
            self._carry(message, 0, self._clock.now_s, cause)
        else:
            self._clock.at(self._clock.now_s, partial(message.deliver, cause))

    def _carry(self, message: Message, leg: int, whole_s: float, cause: int) -> None:
        """Let the message take one link; its last chunk comes to it at `whole_s`."""
        link, ready_s, nbytes = message.route[leg], self._clock.now_s, message.nbytes
        if link.free_s > ready_s:
            cause = link.last_node
        chunk_bytes = self._chunk_bytes(nbytes)
        passage = link.carry(ready_s, nbytes, chunk_bytes, whole_s)
        span = (passage.start_s, passage.end_s)
        mail = message.mail
        node = Node(
            "link", link.number, message.action, mail.step, message.hop, *span, cause
        )
        link.last_node = self._record.add(node)
        if leg + 1 == len(message.route):
            network = self._network
            taken_s = network.hop_s + network.hop_s_per_byte * nbytes
            arrive = partial(message.deliver, link.last_node)
            self._clock.at(passage.last_due_s + taken_s, arrive)
            return
        after = message.route[leg + 1]
        rest_bytes = nbytes - chunk_bytes
        gapless_s = after.course.latest_start_s(passage.last_due_s, rest_bytes)
        carry = partial(self._carry, message, leg + 1, passage.last_due_s, link.last_node)
        self._clock.at(max(passage.first_due_s, gapless_s), carry)

    def _chunk_bytes(self, nbytes: float) -> float:
        """Of what is passed on when it is complete: a frame; between peers, any byte."""
        network = self._network
        if network.topology == "peer":
            return 0.0
        whole_bytes = math.ceil(nbytes)
        headers_bytes = wire_bytes(whole_bytes, network.chunk_bytes) - whole_bytes
        return nbytes * HEADER_BYTES / headers_bytes
