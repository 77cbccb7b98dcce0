"""What goes in and out of one stage: tensors by name, whatever carries them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final

import numpy.typing as npt

from edgetrain.errors import WireError
from edgetrain.manifest import Manifest
from edgetrain.runtime.estimators.base import Arrays, Tick
from edgetrain.runtime.hop_clock import HopClock
from edgetrain.runtime.mailbox import Mailbox, Slot
from edgetrain.runtime.outbox import Outbox
from edgetrain.runtime.packing import Packer
from edgetrain.runtime.parameters import RUN_AHEAD
from edgetrain.tensors import TensorSpec
from edgetrain.wire.frame import Address, Kind
from edgetrain.wire.messages import Command, Deploy
from edgetrain.wire.reassembly import Message
from edgetrain.wire.topics import COORDINATOR

log = logging.getLogger(__name__)

ROOM_POLL_S: Final = 0.005
_KINDS: Final = 3  # that are kept for a microbatch: activations, cotangents, labels
_EVALUATION_SLOTS: Final = 1024  # far more than the coordinator has under way

Array = npt.NDArray[Any]


class Exchange:
    """The stage's side of its cuts.

    Tensors and commands come through one `inbox`, so that a command is never stuck behind
    a tensor that does not come. Every wait handles the commands that arrive meanwhile.

    Attributes:
        sent_bytes: tensors' frames so far, headers included.
        hops: how long training's tensors are under way.
        packer: writes what leaves in the cuts' codecs.

    Args:
        deploy: where the neighbours are.
        manifest: what crosses the cuts.
        outbox: takes what leaves.
        obey: called with each command, on the worker's thread.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        deploy: Deploy,
        manifest: Manifest,
        outbox: Outbox,
        obey: Callable[[Command], None],
        *,
        clock: Callable[[], float],
    ) -> None:
        self.sent_bytes = 0
        self.hops = HopClock()
        self.packer = Packer(deploy)
        self._inbox: SimpleQueue[tuple[float, Message | Command]] = SimpleQueue()
        self._clock = clock
        self._arrived_s: dict[Slot, float] = {}
        self._deploy = deploy
        self._manifest = manifest
        self._outbox = outbox
        self._obey = obey
        self._mailbox = Mailbox(_most_slots(deploy))
        self._packed = {  # how many of each kind; rays are not
            Kind.ACTIVATION: len(manifest.sends),
            Kind.COTANGENT: len(manifest.cotangents_out),
        }
        sent = {spec.name: spec for spec in manifest.sends}
        self._arriving: Mapping[Kind, tuple[TensorSpec, ...]] = {
            Kind.ACTIVATION: (*manifest.receives, *manifest.rays.received),
            Kind.COTANGENT: (
                *(sent[name] for name in manifest.cotangents_in),
                *manifest.rays.slopes_in,
            ),
            Kind.LABELS: () if manifest.labels is None else (manifest.labels,),
        }

    def give(self, item: Message | Command) -> None:
        """Hand over what arrived, from any thread."""
        self._inbox.put((self._clock(), item))

    def wait(self, timeout_s: float | None = None) -> None:
        """Take one item from the inbox: file a tensor or obey a command."""
        try:
            arrived_s, item = self._inbox.get(timeout=timeout_s)
        except Empty:
            return
        if isinstance(item, Message):
            item.taken()
            self._file(item, arrived_s)
        else:
            self._obey(item)

    def wait_for_room(self) -> None:
        """Wait while what was sent and has not arrived is too much.

        What arrives meanwhile is taken in, so that two neighbours that both wait go on.
        """
        while not self._outbox.room:
            self.wait(ROOM_POLL_S)

    def take(self, kind: Kind, tick: Tick, *, evaluation: bool = False) -> dict[str, Array]:
        """Wait for all tensors of a kind for one microbatch."""
        specs = self._expected(kind, evaluation=evaluation)
        slot = Slot(kind, evaluation, tick.step, tick.microbatch)
        while (arrays := self._mailbox.take(slot, len(specs))) is None:
            self.wait()
        if specs and not evaluation:
            self._note(kind, tick, self._arrived_s.pop(slot))
        return {spec.name: array for spec, array in zip(specs, arrays, strict=True)}

    def _note(self, kind: Kind, tick: Tick, arrived_s: float) -> None:
        if kind is Kind.ACTIVATION:
            self.hops.arrived(tick, arrived_s)
        elif kind is Kind.COTANGENT:
            self.hops.returned(tick, arrived_s)

    def advance(self, step: int, *, evaluation: bool = False) -> None:
        """Forget what belongs to earlier steps."""
        self._mailbox.advance(step, evaluation=evaluation)
        if not evaluation:
            self.hops.forget(step)
            for slot in [slot for slot in self._arrived_s if slot.step < step]:
                del self._arrived_s[slot]

    def send_activations(
        self, tick: Tick, values: Arrays, *, evaluation: bool = False
    ) -> None:
        specs = self._manifest.sends if evaluation else self._manifest.downstream
        arrays = [values[spec.name] for spec in specs]
        to = self._manifest.stage + 1
        if not evaluation:
            self.hops.left(tick, self._clock())
        self._send(Kind.ACTIVATION, to, tick, arrays, evaluation=evaluation)

    def send_cotangents(self, tick: Tick, values: Arrays) -> None:
        slopes = (spec.name for spec in self._manifest.rays.slopes_out)
        arrays = [values[name] for name in (*self._manifest.cotangents_out, *slopes)]
        self.hops.answered(tick, self._clock())
        self._send(Kind.COTANGENT, self._manifest.stage - 1, tick, arrays)

    def send_labels(self, tick: Tick, labels: Array, *, evaluation: bool = False) -> None:
        """From the device that has the data straight to the stages that compare."""
        heads = () if evaluation else self._deploy.route.heads
        for to in (*heads, self._manifest.stages - 1):
            self._send(Kind.LABELS, to, tick, [labels], evaluation=evaluation)

    def send_weights(self, commit: int, weights: Array) -> None:
        """To the coordinator; `commit` counts the steps that are in the weights."""
        deploy = self._deploy
        address = Address(Kind.WEIGHTS, deploy.run, deploy.epoch, deploy.stage, commit)
        self._outbox.put(COORDINATOR, address, weights, chunk_bytes=deploy.chunk_bytes)

    def send_state(self, commit: int, state: bytes) -> None:
        """To the coordinator, as `send_weights`."""
        deploy = self._deploy
        address = Address(Kind.STATE, deploy.run, deploy.epoch, deploy.stage, commit)
        self._outbox.put(COORDINATOR, address, state, chunk_bytes=deploy.chunk_bytes)

    def _send(
        self,
        kind: Kind,
        stage: int,
        tick: Tick,
        arrays: Sequence[Array],
        *,
        evaluation: bool = False,
    ) -> None:
        deploy = self._deploy
        to = deploy.route.to(stage)
        packed = self._packed.get(kind, 0)
        for index, array in enumerate(arrays):
            place = (tick.step, tick.microbatch, index, evaluation)
            address = Address(kind, deploy.run, deploy.epoch, stage, *place)
            body = self.packer.pack(address, array) if index < packed else array
            self.sent_bytes += self._outbox.put(
                to, address, body, chunk_bytes=deploy.chunk_bytes
            )

    def _expected(self, kind: Kind, *, evaluation: bool) -> tuple[TensorSpec, ...]:
        """The tensors of a kind for one microbatch; no noise is carried in evaluation."""
        if evaluation and kind is Kind.ACTIVATION:
            return self._manifest.receives
        return self._arriving.get(kind, ())

    def _file(self, message: Message, arrived_s: float) -> None:
        a = message.address
        try:
            if self._mailbox.put(a, self._checked(message)) and not a.evaluation:
                slot = Slot(a.kind, a.evaluation, a.step, a.microbatch)
                self._arrived_s[slot] = arrived_s
        except WireError as error:
            log.warning("stage %d: tensor dropped: %s", self._deploy.stage, error)

    def _checked(self, message: Message) -> Array:
        """The message's tensor, if this stage takes one of that address, type and size."""
        address = message.address
        known = self._expected(address.kind, evaluation=address.evaluation)
        if address.tensor >= len(known):
            raise WireError(f"{address}: this stage takes no such tensor")
        spec = known[address.tensor]
        if message.dtype != spec.dtype:
            raise WireError(f"{address}: {message.dtype}, not {spec.dtype}")
        return message.array(spec.shape)


def _most_slots(deploy: Deploy) -> int:
    """What neighbours can send before this stage's update lets the run go on."""
    return _EVALUATION_SLOTS + _KINDS * (RUN_AHEAD + 2) * deploy.microbatches
