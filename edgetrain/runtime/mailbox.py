"""Tensors that have arrived, until the schedule asks for them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy.typing as npt

from edgetrain.wire.frame import Address, Kind

STEPS_AHEAD: Final = 64
SLOTS: Final = 1024


class Slot(NamedTuple):
    """All the tensors of one kind for one microbatch."""

    kind: Kind
    evaluation: bool
    step: int
    microbatch: int


class Mailbox:
    """Keeps what comes early and drops what comes late or twice.

    Putting never waits, so a full pipeline cannot stop the message loop. What bounds the
    memory is the schedule; whatever else comes, `most_slots` are kept, and no training step
    far ahead of the present one. Evaluations are numbered through the run, so the first one
    under a new plan may bear any number.
    """

    def __init__(self, most_slots: int = SLOTS) -> None:
        self._most_slots = most_slots
        self._slots: dict[Slot, dict[int, npt.NDArray[Any]]] = {}
        self._present = {False: 0, True: 0}
        self._taken: set[Slot] = set()

    def put(self, address: Address, array: npt.NDArray[Any]) -> bool:
        """Keep a tensor; False when it is late, a duplicate, or absurdly early."""
        a = address
        slot = Slot(a.kind, a.evaluation, a.step, a.microbatch)
        present = self._present[a.evaluation]
        early = a.step >= present + STEPS_AHEAD and not a.evaluation
        full = slot not in self._slots and len(self._slots) >= self._most_slots
        if slot in self._taken or a.step < present or early or full:
            return False
        return self._slots.setdefault(slot, {}).setdefault(a.tensor, array) is array

    def take(self, slot: Slot, tensors: int) -> list[npt.NDArray[Any]] | None:
        """The slot's tensors in order once all are there; None until then."""
        arrived = self._slots.get(slot, {})
        if len(arrived) < tensors:
            return None
        self._slots.pop(slot, None)
        self._taken.add(slot)
        return [arrived[index] for index in range(tensors)]

    def advance(self, step: int, *, evaluation: bool) -> None:
        """Forget all steps before `step`."""
        self._present[evaluation] = step
        for slots in (self._slots, self._taken):
            for slot in [s for s in slots if s.evaluation == evaluation and s.step < step]:
                slots.pop(slot) if isinstance(slots, dict) else slots.remove(slot)
