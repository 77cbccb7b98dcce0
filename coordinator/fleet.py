"""The devices there are, and the events they send."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from edgetrain.errors import DeviceError, FleetError, WireError
from edgetrain.runtime.inbox import Inbox
from edgetrain.transport.base import Inbound, Presence, Transport
from edgetrain.wire.frame import Address
from edgetrain.wire.hello import Hello
from edgetrain.wire.messages import (
    Command,
    Report,
    decode_hello,
    decode_report,
    encode,
)
from edgetrain.wire.reassembly import Message
from edgetrain.wire.signature import Signer
from edgetrain.wire.topics import Channel

log = logging.getLogger(__name__)

QUIET_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Gone:
    """A device's connection ended."""

    device: str


@dataclass(frozen=True, slots=True)
class Said:
    """A device reported something."""

    device: str
    report: Report


@dataclass(frozen=True, slots=True)
class Undelivered:
    """What was sent to a device does not arrive, or what it sends breaks the rules."""

    device: str
    run: int
    epoch: int
    reason: str


Event = Gone | Said | Undelivered | Message


class Fleet:
    """All devices of a namespace.

    Messages are sorted on the transport's threads and read one by one with `event`.

    Attributes:
        inbox: takes what devices send on the DATA channel.

    Args:
        transport: the coordinator's, not yet open.
        signer: of commands to devices that take no others.
    """

    def __init__(self, transport: Transport, signer: Signer | None = None) -> None:
        self._transport = transport
        self._signer = signer
        self._arrivals: SimpleQueue[Presence | Said | Undelivered | Message] = SimpleQueue()
        self.inbox = Inbox(self._admits)
        self._epochs: dict[int, int] = {}
        self._hellos: dict[str, Hello] = {}
        self._contested: set[str] = set()

    @property
    def transport(self) -> Transport:
        return self._transport

    def open(self) -> None:
        """Connect and start to watch.

        Raises:
            TransportError: the broker cannot be reached or refuses us.
        """
        self._transport.open(self._receive, on_presence=self._arrivals.put)

    def wait(
        self, names: Collection[str], count: int, timeout_s: float
    ) -> dict[str, Hello]:
        """Wait until all devices named, and `count` in all, are there.

        Raises:
            FleetError: they are not there in time, or two agents bear one name.
        """
        deadline = time.monotonic() + timeout_s
        while not (set(names) <= self._hellos.keys() and len(self._hellos) >= count):
            if not self._settle(deadline - time.monotonic()):
                raise FleetError(_missing(names, count, self._hellos, timeout_s))
        return self.settled()

    def settled(self, quiet_s: float = QUIET_S) -> dict[str, Hello]:
        """The devices that are there, by name, once no more appear for a moment.

        Raises:
            FleetError: two agents bear one name.
        """
        while self._settle(quiet_s):
            pass
        for name in sorted(self._contested):
            raise FleetError(
                f"two agents are named {name!r}: give each its own --name, stop one of"
                " them, and start again"
            )
        return dict(sorted(self._hellos.items()))

    def event(self, timeout_s: float) -> Event | None:
        """The next thing that happened; None when nothing did in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                left = max(0.0, deadline - time.monotonic())
                arrival = self._arrivals.get(timeout=left)
            except Empty:
                return None
            if isinstance(arrival, Message):
                arrival.taken()
            if not isinstance(arrival, Presence):
                return arrival
            known = arrival.device in self._hellos
            self._note(arrival)
            if known and arrival.gone:
                return Gone(arrival.device)

    def command(self, device: str, command: Command) -> None:
        """Send a command, signed where the device asks for it.

        Raises:
            DeviceError: it obeys another key than ours.
        """
        self._epochs[command.run] = command.epoch
        data = encode(command)
        hello = self._hellos.get(device)
        if hello is not None and hello.signed_by:
            if self._signer is None or self._signer.fingerprint != hello.signed_by:
                raise DeviceError(
                    device,
                    f"takes only commands signed with the key {hello.signed_by}:"
                    " give --fleet FILE, or [fleet] signing_key_file, of its fleet",
                )
            data = self._signer.sign(data, device, hello.session)
        self._transport.send(device, Channel.CONTROL, data)

    def undelivered(self, device: str, run: int, epoch: int, reason: str) -> None:
        """Make an event of what an outbox has to say, from any thread."""
        self._arrivals.put(Undelivered(device, run, epoch, reason))

    def close(self) -> None:
        self._transport.close()

    def _settle(self, timeout_s: float) -> bool:
        """Take in one arrival, presence or not; False when there is none in time."""
        try:
            arrival = self._arrivals.get(timeout=max(0.0, timeout_s))
        except Empty:
            return False
        if isinstance(arrival, Presence):
            self._note(arrival)
        if isinstance(arrival, Message):
            arrival.taken()
        return True

    def _note(self, presence: Presence) -> None:
        known = self._hellos.get(presence.device)
        if presence.gone:
            self._hellos.pop(presence.device, None)
            self._contested.discard(presence.device)
            return
        try:
            hello = decode_hello(presence.payload)
        except WireError as error:
            log.warning("presence of %s ignored: %s", presence.device, error)
            return
        if known is not None and known.session != hello.session:
            self._contested.add(presence.device)
        self._hellos[presence.device] = hello

    def _receive(self, inbound: Inbound) -> None:
        try:
            if inbound.channel is Channel.CONTROL:
                self._arrivals.put(Said(inbound.source, decode_report(inbound.payload)))
                return
            message = self.inbox.receive(inbound)
            if message is not None:
                self._arrivals.put(message)
        except WireError as error:
            log.warning("message from %s dropped: %s", inbound.source, error)

    def _admits(self, _source: str, address: Address) -> bool:
        """Of the plan that was last spoken of, in each run."""
        return self._epochs.get(address.run) == address.epoch


def _missing(
    names: Collection[str], count: int, devices: Collection[str], timeout_s: float
) -> str:
    there = ", ".join(devices) or "none"
    wanted = ", ".join(sorted(set(names) - set(devices)))
    need = f"waiting for {wanted}" if wanted else f"{count} are needed"
    return (
        f"too few devices after {timeout_s:g} s: {need}; there: {there}. Start the missing"
        " agents (edgetrain-agent run --broker URL --name NAME) on the same broker and"
        " namespace, or raise [fleet] wait_s"
    )
