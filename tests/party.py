"""A transport with inboxes, and the brokers that tests run on."""

import queue
import shutil
from dataclasses import dataclass, field

import pytest

from edgetrain.transport.base import Inbound, Presence, Transport

WAIT_S = 20.0  # only a failing test waits this long

mosquitto = pytest.param(
    "mosquitto",
    marks=pytest.mark.skipif(not shutil.which("mosquitto"), reason="no mosquitto on PATH"),
)


@dataclass
class Party:
    """A transport and what has arrived at it."""

    transport: Transport
    inbox: queue.SimpleQueue[Inbound] = field(default_factory=queue.SimpleQueue)
    seen: queue.SimpleQueue[Presence] = field(default_factory=queue.SimpleQueue)

    def open(self, announce: bytes | None = None, *, watch: bool = False) -> "Party":
        on_presence = self.seen.put if watch else None
        self.transport.open(self.inbox.put, on_presence=on_presence, announce=announce)
        return self

    def take(self) -> Inbound:
        return self.inbox.get(timeout=WAIT_S)

    def takes_presence(self) -> tuple[str, bytes]:
        presence = self.seen.get(timeout=WAIT_S)
        return presence.device, presence.payload
