"""A transport that loses, doubles, reorders and damages tensors, over any other one."""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass

import numpy as np

from edgetrain.transport.base import OnPresence, Payload, Receive, Transport
from edgetrain.transport.traffic import Traffic
from edgetrain.wire.topics import Channel


@dataclass(frozen=True, slots=True)
class Faults:
    """What befalls a message of the DATA or FLOW channel, each with a chance from 0 to 1.

    Attributes:
        lose: it does not arrive.
        duplicate: it comes twice.
        reorder: it comes after one or a few later ones; never, if none follow.
        damage: a bit of it is flipped.
        seed: of all that is left to chance; with the name of the party.
    """

    lose: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    damage: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class _Held:
    later: int
    to: str
    channel: Channel
    payload: bytes


class FaultyTransport:
    """Implements `Transport`; CONTROL messages pass unharmed, as a broker repeats them."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        key = [faults.seed, zlib.crc32(inner.name.encode())]
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
        self._lock = threading.Lock()
        self._held: list[_Held] = []

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def traffic(self) -> Traffic:
        return self._inner.traffic

    @property
    def payload_limit_bytes(self) -> int:
        """See `Transport.payload_limit_bytes`."""
        return self._inner.payload_limit_bytes

    def open(
        self,
        receive: Receive,
        *,
        on_presence: OnPresence | None = None,
        announce: bytes | None = None,
    ) -> None:
        """See `Transport.open`."""
        self._inner.open(receive, on_presence=on_presence, announce=announce)

    def send(self, to: str, channel: Channel, payload: Payload) -> None:
        """See `Transport.send`."""
        if channel is Channel.CONTROL:
            self._inner.send(to, channel, payload)
            return
        with self._lock:
            copies = self._befall(to, channel, bytes(payload))
            for held in self._held:
                held.later -= 1
            due = [held for held in self._held if held.later <= 0]
            self._held = [held for held in self._held if held.later > 0]
        for copy in copies:
            self._inner.send(to, channel, copy)
        for held in due:
            self._inner.send(held.to, held.channel, held.payload)

    def withdraw(self) -> None:
        """See `Transport.withdraw`."""
        self._inner.withdraw()

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()

    def kill(self) -> None:
        """See `Transport.kill`."""
        self._inner.kill()

    def _befall(self, to: str, channel: Channel, payload: bytes) -> list[bytes]:
        """What is sent in its place at once."""
        lost, doubled, reordered, damaged = self._random.random(4)
        faults = self._faults
        if lost < faults.lose:
            return []
        if damaged < faults.damage and payload:
            payload = self._with_a_flipped_bit(payload)
        if reordered < faults.reorder:
            later = int(self._random.integers(2, 6))
            self._held.append(_Held(later, to, channel, payload))
            return []
        return [payload] * (2 if doubled < faults.duplicate else 1)

    def _with_a_flipped_bit(self, payload: bytes) -> bytes:
        flipped = bytearray(payload)
        flipped[self._random.integers(len(flipped))] ^= 1 << int(self._random.integers(8))
        return bytes(flipped)
