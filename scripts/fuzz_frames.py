"""Feeds mutated frames, receipts and control messages to what reads them on the network.

    python scripts/fuzz_frames.py [COUNT] [SEED]

Half of the mutants get a checksum that matches, as an attacker would see to. Anything but
a `WireError`, and memory beyond the windows, is a defect: the script stops with the mutant.
"""

from __future__ import annotations

import resource
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgetrain.errors import WireError
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.inbox import Bounds, Inbox
from edgetrain.transport.base import Inbound
from edgetrain.transport.reliable import Sender
from edgetrain.wire.frame import HEADER_BYTES, Address, Kind, Parcel
from edgetrain.wire.hello import Hello
from edgetrain.wire.messages import (
    Deploy,
    Evaluated,
    Failed,
    Route,
    StepDone,
    Train,
    decode_command,
    decode_hello,
    decode_report,
    encode,
)
from edgetrain.wire.receipt import Ask, Receipt, encode_note, parse_note
from edgetrain.wire.ticket import Ticket
from edgetrain.wire.topics import Channel

WINDOW_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 22
EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many were taken and refused, by reader, and how much memory that took."""

    taken: Counter[str]
    refused: Counter[str]
    growth_bytes: int


class Readers:
    """Everything of ours that reads bytes from a network."""

    def __init__(self) -> None:
        bounds = Bounds(WINDOW_BYTES, MAX_MESSAGE_BYTES)
        self.inbox = Inbox(lambda *_: True, bounds=bounds)
        self._received = 0
        self._sender = Sender(7, 0, 5)
        body = bytes(100_000)
        for step in range(4):
            address = Address(Kind.ACTIVATION, 7, 0, 1, step)
            self._sender.offer((step,), Parcel(address, body, 1000), 0.0)
        while self._sender.next(0.0) is not None:
            pass
        self.table: dict[str, Callable[[bytes], object]] = {
            "frame": lambda data: self._receive(Channel.DATA, data),
            "note": self._note,
            "command": decode_command,
            "report": decode_report,
            "hello": decode_hello,
        }

    def _receive(self, channel: Channel, data: bytes) -> None:
        """From a peer that is another after a few, as one that lies is cut off."""
        self._received += 1
        peer = f"peer{self._received // 8}"
        message = self.inbox.receive(Inbound(peer, channel, data))
        if message is not None and message.address.step % 2:
            message.taken()
        self.inbox.due(1e12)  # as the sending end does, which then forgets them

    def _note(self, data: bytes) -> None:
        self._receive(Channel.FLOW, data)
        note = parse_note(data)
        if isinstance(note, Receipt):
            self._sender.hear(note, 1.0)


def fuzz(count: int, seed: int) -> Outcome:
    """Try so many mutants.

    Raises:
        AssertionError: a reader fails otherwise than with a WireError.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    seeds, readers = corpus(), Readers()
    kinds = list(seeds)
    taken, refused = Counter[str](), Counter[str]()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        kind = kinds[number % len(kinds)]
        base = seeds[kind][int(random.integers(len(seeds[kind])))]
        data = mutate(base, random)
        if random.random() < 0.5:
            data = signed(kind, data)
        try:
            readers.table[kind](data)
            taken[kind] += 1
        except WireError:
            refused[kind] += 1
        except Exception as error:
            raise AssertionError(f"{kind} {data.hex()}: {error!r}") from error
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Outcome(taken, refused, (after_kib - before_kib) * 1024)


def corpus() -> dict[str, list[bytes]]:
    """Valid ones of every kind."""
    frames = []
    for number, size in enumerate((0, 10, 3000, 20_000)):
        for kind in Kind:
            parcel = Parcel(Address(kind, 7, number % 3, 1, number), bytes(size), 1000)
            for chunk in range(min(parcel.chunks, 3)):
                ticket = Ticket(number, number + chunk, number + chunk, number % 2)
                frames.append(bytes(parcel.frame(chunk, ticket)))
    optimizer = OptimizerSpec(name="sgd", lr=LRSpec(base=0.1))
    deploy = Deploy(7, 0, 1, Route(("a", "b")), "00", 9, "1f1b", 4, optimizer, 0, 1000)
    reports = (
        StepDone(7, 0, 1, 3, 1.0, 4, 0.1, 0.1, 100, 200),
        Evaluated(7, 0, 1, 0.5, 3.0, 4, bytes(16)),
        Failed(7, 0, 1, 3, "why", diverged=True),
    )
    hello = Hello("a", "s", "0.1", "cpu", ("CPU",), "auto", 1 << 30, 1e9, 2)
    notes = (Receipt(7, 0, 5, 3, 4, 0, 1 << 23, b"\x05"), Ask(7, 0))
    return {
        "frame": frames,
        "note": [encode_note(note) for note in notes],
        "command": [encode(deploy), encode(Train(7, 0, 5))],
        "report": [encode(report) for report in reports],
        "hello": [encode(hello)],
    }


def mutate(base: bytes, random: np.random.Generator) -> bytes:
    """One to four changes: bits, edge numbers, cuts, repeats, noise."""
    data = bytearray(base)
    for _ in range(int(random.integers(1, 5))):
        at = int(random.integers(len(data) + 1))
        match int(random.integers(5)):
            case 0 if at < len(data):
                data[at] ^= 1 << int(random.integers(8))
            case 1 if at + 4 <= len(data):
                struct.pack_into("<I", data, at, EDGES[int(random.integers(len(EDGES)))])
            case 2:
                del data[at : at + int(random.integers(16))]
            case 3:
                data[at:at] = data[at : at + int(random.integers(64))]
            case _:
                data[at:at] = random.bytes(int(random.integers(9)))
    return bytes(data)


def signed(kind: str, data: bytes) -> bytes:
    """With the lengths and checksum that its reader asks for first."""
    out = bytearray(data)
    if kind == "frame" and len(out) >= HEADER_BYTES:
        fields = HEADER_BYTES - 4
        struct.pack_into("<I", out, fields - 4, len(out) - HEADER_BYTES)
        crc = zlib.crc32(out[HEADER_BYTES:], zlib.crc32(out[:fields]))
        struct.pack_into("<I", out, fields, crc)
    elif kind == "note" and len(out) > 4:
        struct.pack_into("<I", out, len(out) - 4, zlib.crc32(out[:-4]))
    return bytes(out)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    outcome = fuzz(count, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for kind in outcome.refused:
        print(f"{kind}: {outcome.taken[kind]} taken, {outcome.refused[kind]} refused")
    print(f"memory grew by {outcome.growth_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
