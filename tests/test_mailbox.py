"""A mailbox keeps what is early, and drops what is late, twice or absurd."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgetrain.runtime.mailbox import STEPS_AHEAD, Mailbox, Slot
from edgetrain.wire.frame import Address, Kind


def address(step: int = 0, microbatch: int = 0, tensor: int = 0, **more) -> Address:
    kind = more.pop("kind", Kind.ACTIVATION)
    return Address(kind, 1, 0, 1, step, microbatch, tensor, **more)


def slot(step: int = 0, microbatch: int = 0, kind: Kind = Kind.ACTIVATION) -> Slot:
    return Slot(kind, False, step, microbatch)


def array(value: float = 0.0) -> np.ndarray:
    return np.full(3, value, np.float32)


def test_a_slot_is_taken_once_all_its_tensors_are_there():
    mailbox = Mailbox()
    second, first = array(2), array(1)
    assert mailbox.put(address(tensor=1), second)
    assert mailbox.take(slot(), 2) is None
    assert mailbox.put(address(tensor=0), first)
    taken = mailbox.take(slot(), 2)
    assert taken is not None
    assert taken[0] is first
    assert taken[1] is second


def test_a_slot_of_no_tensors_is_always_there():
    assert Mailbox().take(slot(kind=Kind.COTANGENT), 0) == []


def test_a_duplicate_changes_nothing():
    mailbox = Mailbox()
    kept = array(1)
    assert mailbox.put(address(), kept)
    assert not mailbox.put(address(), array(2))
    taken = mailbox.take(slot(), 1)
    assert taken is not None
    assert taken[0] is kept
    assert not mailbox.put(address(), array(3)), "taken already"
    assert mailbox.take(slot(), 1) is None


def test_kinds_microbatches_and_evaluation_are_kept_apart():
    mailbox = Mailbox()
    places = [
        address(),
        address(microbatch=1),
        address(step=1),
        address(kind=Kind.COTANGENT),
        address(evaluation=True),
    ]
    assert all(mailbox.put(place, array(i)) for i, place in enumerate(places))
    for number, place in enumerate(places):
        found = mailbox.take(
            Slot(place.kind, place.evaluation, place.step, place.microbatch), 1
        )
        assert found is not None
        assert found[0][0] == number


def test_late_and_absurdly_early_tensors_are_dropped():
    mailbox = Mailbox()
    mailbox.advance(5, evaluation=False)
    assert not mailbox.put(address(step=4), array())
    assert mailbox.put(address(step=5), array())
    assert mailbox.put(address(step=4 + STEPS_AHEAD), array())
    assert not mailbox.put(address(step=5 + STEPS_AHEAD), array())
    assert mailbox.put(address(step=0, evaluation=True), array()), "counts apart"
    assert mailbox.put(address(step=10**6, evaluation=True), array()), "of a long run"


def test_it_keeps_no_more_slots_than_it_may():
    mailbox = Mailbox(most_slots=2)
    for microbatch in range(5):
        assert mailbox.put(address(microbatch=microbatch), array()) == (microbatch < 2)
    assert mailbox.put(address(microbatch=1, tensor=1), array())


def test_advancing_frees_what_was_left_and_keeps_what_is_to_come():
    mailbox = Mailbox()
    for step in range(4):
        mailbox.put(address(step=step), array(step))
    mailbox.advance(2, evaluation=False)
    assert mailbox.take(slot(step=1), 1) is None
    for step in (2, 3):
        found = mailbox.take(slot(step=step), 1)
        assert found is not None
        assert found[0][0] == step


@given(st.permutations(range(12)), st.data())
def test_any_order_with_any_duplicates_gives_each_tensor_once(order, data):
    """Three tensors of each of four microbatches, each sent once or more."""
    mailbox = Mailbox()
    for number in order:
        place = address(microbatch=number // 3, tensor=number % 3)
        for copy in range(data.draw(st.integers(1, 3))):
            assert mailbox.put(place, array(number)) == (copy == 0)
    for microbatch in range(4):
        found = mailbox.take(slot(microbatch=microbatch), 3)
        assert found is not None
        assert [int(a[0]) for a in found] == [3 * microbatch + i for i in range(3)]
        assert mailbox.take(slot(microbatch=microbatch), 3) is None
