"""Commands that may have been lost are said again, and only those."""

from __future__ import annotations

from coordinator.fleet import Fleet, Gone
from coordinator.reminder import Reminder
from edgetrain.transport.memory import MemoryHub, MemoryTransport
from edgetrain.wire.messages import Fetch, Train
from edgetrain.wire.topics import COORDINATOR

IDS = (7, 0)


def listening() -> tuple[MemoryHub, Fleet]:
    hub = MemoryHub()
    fleet = Fleet(MemoryTransport(hub, COORDINATOR))
    fleet.open()
    return hub, fleet


def test_silence_brings_the_last_commands_again():
    _, fleet = listening()
    sent = []
    reminder = Reminder(fleet, sent.append, silence_s=0.01)
    reminder.command(Train(*IDS, 3))
    reminder.command(Fetch(*IDS, 3))
    assert reminder.event(0.05) is None
    assert sent[:2] == [Train(*IDS, 3), Fetch(*IDS, 3)]
    assert sent[2:]
    assert set(sent[2:]) == {Train(*IDS, 3)}, "what is fetched may be large"
    fleet.close()


def test_nothing_is_said_again_of_a_plan_that_is_over():
    _, fleet = listening()
    sent = []
    reminder = Reminder(fleet, sent.append, silence_s=0.01)
    reminder.command(Train(*IDS, 3))
    reminder.forget()
    assert reminder.event(0.05) is None
    assert sent == [Train(*IDS, 3)]
    fleet.close()


def test_an_event_is_given_at_once_and_nothing_is_said_again():
    _, fleet = listening()
    fleet.undelivered("pi", *IDS, "gone")
    sent = []
    reminder = Reminder(fleet, sent.append, silence_s=5.0)
    reminder.command(Train(*IDS, 3))
    event = reminder.event(20.0)
    assert event is not None
    assert not isinstance(event, Gone)
    assert sent == [Train(*IDS, 3)]
    fleet.close()
