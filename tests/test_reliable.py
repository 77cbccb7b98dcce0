"""Laws of the two ends of a stream: everything comes once and intact, whatever is lost."""

import heapq
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import FlowError, WireError
from edgetrain.transport.receipts import Receiver
from edgetrain.transport.reliable import LEAST_TIMEOUT_S, LONGEST_TIMEOUT_S, Sender, Timeout
from edgetrain.wire.frame import Address, Frame, Kind, Parcel, parse
from edgetrain.wire.reassembly import Reassembler
from edgetrain.wire.receipt import (
    FRAMES_AHEAD,
    LEAST_WINDOW_BYTES,
    Ask,
    Receipt,
    charge_bytes,
    encode_note,
    parse_note,
)
from edgetrain.wire.ticket import Ticket

RUN, EPOCH = 7, 1
WINDOW = LEAST_WINDOW_BYTES
LIMIT = 1 << 24


class Channel:
    """Loses, doubles, delays, reorders and damages, by its seed."""

    def __init__(self, random: np.random.Generator, harm: float) -> None:
        self._random = random
        self._harm = harm
        self._tick = itertools.count()
        self._flying: list[tuple[float, int, bytes]] = []

    def put(self, payload: bytes, now_s: float) -> None:
        for _ in range(1 + int(self._random.random() < self._harm)):
            if self._random.random() < self._harm:
                continue
            sent = bytearray(payload)
            if self._random.random() < self._harm / 2:
                sent[self._random.integers(len(sent))] ^= 1 << self._random.integers(8)
            late_s = self._random.exponential(0.05) if self._harm else 0.01
            item = (now_s + late_s, next(self._tick), bytes(sent))
            heapq.heappush(self._flying, item)

    @property
    def next_s(self) -> float:
        return self._flying[0][0] if self._flying else float("inf")

    def take(self) -> bytes:
        return heapq.heappop(self._flying)[2]


class Stream:
    """A sender and a receiver on a virtual clock; messages wait before they are taken."""

    def __init__(self, seed: int, harm: float, take_s: float) -> None:
        random = np.random.default_rng(seed)
        self.there, self.back = Channel(random, harm), Channel(random, harm)
        self.sender = Sender(RUN, EPOCH, 0)
        self.receiver = Receiver((RUN, EPOCH, 0), WINDOW)
        self.reassembler = Reassembler(LIMIT, max_open=FRAMES_AHEAD, max_open_bytes=LIMIT)
        self.arrived: list[tuple[Address, bytes]] = []
        self.waiting: list[tuple[float, int]] = []
        self.take_s = take_s
        self.now_s = 0.0
        self.peak_bytes = 0
        self.largest = 0

    def offer(self, address: Address, body: bytes, chunk_bytes: int) -> None:
        urgency = (address.step, address.microbatch, len(self.waiting))
        parcel = Parcel(address, body, chunk_bytes)
        self.largest = max(self.largest, charge_bytes(len(body), parcel.chunks))
        self.sender.offer(urgency, parcel, self.now_s)

    def run(self, until_s: float = 1000.0) -> None:
        while not self.sender.idle and self.now_s < until_s:
            while (piece := self.sender.next(self.now_s)) is not None:
                frame = piece.parcel.frame(piece.chunk, piece.ticket)
                self.there.put(bytes(frame), self.now_s)
            self._flush()
            self._step()
            bound = max(WINDOW, self.largest)
            assert self.receiver.charged_bytes <= bound

    def _step(self) -> None:
        due = (
            (self.there.next_s, self._frame),
            (self.back.next_s, self._note),
            (self.waiting[0][0] if self.waiting else float("inf"), self._take),
            (self.receiver.due_s, self._flush),
            (self.sender.due_s, self._expire),
        )
        at_s, act = min(due, key=lambda pair: pair[0])
        self.now_s = max(self.now_s, at_s)
        act()

    def _frame(self) -> None:
        try:
            frame = parse(self.there.take(), max_body_bytes=1 << 20)
        except WireError:
            return
        if not self.receiver.accept(frame, self.now_s):
            return
        message = self.reassembler.feed(frame)
        if message is not None:
            self.arrived.append((message.address, bytes(message.body)))
            last_s = self.waiting[-1][0] if self.waiting else self.now_s
            self.waiting.append((last_s + self.take_s, frame.ticket.message))

    def _note(self) -> None:
        try:
            note = parse_note(self.back.take())
        except WireError:
            return
        assert isinstance(note, Receipt)
        self.sender.hear(note, self.now_s)

    def _take(self) -> None:
        self.receiver.consume(self.waiting.pop(0)[1], self.now_s)

    def _flush(self) -> None:
        if self.receiver.due_s <= self.now_s:
            self.back.put(encode_note(self.receiver.receipt()), self.now_s)

    def _expire(self) -> None:
        if self.sender.expire(self.now_s) is not None:
            self.receiver.asked(self.now_s)


def letter(number: int, size: int) -> tuple[Address, bytes]:
    address = Address(Kind.ACTIVATION, RUN, EPOCH, 1, step=number)
    return address, np.random.default_rng(number).bytes(size)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32),
    st.floats(0.0, 0.4),
    st.lists(st.sampled_from([0, 10, 5_000, 300_000, 2_000_000]), min_size=1, max_size=12),
    st.floats(0.0, 0.1),
)
def test_every_message_comes_once_and_intact(seed, harm, sizes, take_s):
    stream = Stream(seed, harm, take_s)
    letters = [letter(i, size) for i, size in enumerate(sizes)]
    for address, body in letters:
        stream.offer(address, body, 100_000)
    stream.run()
    assert stream.sender.idle
    assert stream.sender.held_bytes == 0
    assert sorted(stream.arrived, key=lambda pair: pair[0].step) == letters
    assert stream.reassembler.open_bytes == 0


def test_nothing_is_sent_twice_on_a_good_link():
    stream = Stream(0, 0.0, 0.02)
    for i in range(60):
        stream.offer(*letter(i, 200_000), 50_000)
    stream.run()
    assert len(stream.arrived) == 60
    assert stream.sender.resent == 0


def test_all_under_way_that_is_lost_at_once_goes_again():
    stream = Stream(0, 0.0, 0.0)
    stream.offer(*letter(0, 900_000), 50_000)
    while stream.sender.next(0.0) is not None:
        pass
    stream.run()
    assert stream.arrived == [letter(0, 900_000)]
    assert stream.sender.resent <= 20


def test_what_is_needed_sooner_goes_first():
    sender = Sender(RUN, EPOCH, 0)
    sender.offer((1, 0), Parcel(letter(9, 0)[0], bytes(400_000), 100_000), 0.0)
    first = sender.next(0.0)
    sender.offer((0, 5), Parcel(letter(5, 0)[0], b"b", 10), 0.0)
    sender.offer((0, 3), Parcel(letter(3, 0)[0], b"a", 10), 0.0)
    order = [first, *iter(lambda: sender.next(0.0), None)]
    assert [piece.parcel.address.step for piece in order] == [9, 3, 5, 9, 9, 9]
    assert [piece.ticket.sequence for piece in order] == list(range(6))


def test_a_message_over_the_window_goes_alone():
    sender = Sender(RUN, EPOCH, 0)
    sender.offer((0,), Parcel(letter(0, 0)[0], bytes(2 * WINDOW), 100_000), 0.0)
    sender.offer((1,), Parcel(letter(1, 0)[0], b"small", 100_000), 0.0)
    sent = [piece.parcel.address.step for piece in iter(lambda: sender.next(0.0), None)]
    assert set(sent) == {0}


def frame(ticket: Ticket, size: int = 10, chunks: int = 1) -> Frame:
    address = letter(ticket.message, 0)[0]
    body = memoryview(bytes(size))
    return Frame(address, "", 0, chunks, size * chunks, 0, body, ticket)


def test_who_sends_beyond_the_window_is_found_out():
    receiver = Receiver((RUN, EPOCH, 0), WINDOW)
    assert receiver.accept(frame(Ticket(0, 0, 0), WINDOW, 4), 0.0)
    with pytest.raises(FlowError, match="not taken yet; the window is 1048576 B"):
        receiver.accept(frame(Ticket(1, 1, 1)), 0.0)
    with pytest.raises(FlowError, match="under way"):
        receiver.accept(frame(Ticket(1, 1 + FRAMES_AHEAD, 1)), 0.0)
    with pytest.raises(FlowError, match="number of another message"):
        receiver.accept(frame(Ticket(0, 2, 2), 5), 0.0)


@settings(derandomize=True)
@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 2**63))
def test_who_acknowledges_what_was_not_sent_is_found_out(low, turn, consumed):
    sender = Sender(RUN, EPOCH, 0)
    sender.offer((0,), Parcel(letter(0, 0)[0], bytes(100), 10), 0.0)
    sent = len(list(iter(lambda: sender.next(0.0), None)))
    receipt = Receipt(RUN, EPOCH, 0, low, turn, consumed, WINDOW)
    if low <= sent and turn <= sent and consumed <= charge_bytes(100, 10):
        sender.hear(receipt, 1.0)
    else:
        with pytest.raises(FlowError):
            sender.hear(receipt, 1.0)


def test_a_receipt_that_is_lost_is_asked_for():
    sender, receiver = Sender(RUN, EPOCH, 0), Receiver((RUN, EPOCH, 0), WINDOW)
    sender.offer((0,), Parcel(letter(0, 0)[0], bytes(WINDOW), WINDOW), 0.0)
    sender.offer((1,), Parcel(letter(1, 0)[0], bytes(WINDOW), WINDOW), 0.0)
    piece = sender.next(0.0)
    data = piece.parcel.frame(piece.chunk, piece.ticket)
    receiver.accept(parse(data, max_body_bytes=WINDOW), 0.0)
    sender.hear(receiver.receipt(), 0.1)
    receiver.consume(0, 0.2)
    receiver.receipt()  # lost
    assert sender.next(1.0) is None
    assert sender.expire(sender.due_s) == Ask(RUN, EPOCH)
    receiver.asked(2.0)
    assert receiver.due_s == 2.0
    sender.hear(receiver.receipt(), 2.0)
    assert sender.next(2.0) is not None


@settings(derandomize=True)
@given(st.lists(st.one_of(st.none(), st.floats(0.0, 100.0)), max_size=50))
def test_a_timeout_stays_within_its_bounds(events):
    timeout = Timeout()
    for seconds in events:
        timeout.expired() if seconds is None else timeout.measured(seconds)
        assert LEAST_TIMEOUT_S <= timeout.seconds <= LONGEST_TIMEOUT_S


numbers = st.integers(0, 2**32 - 1)
counts = st.integers(0, 2**64 - 1)


@settings(derandomize=True)
@given(
    st.one_of(
        st.builds(Ask, numbers, numbers),
        st.builds(
            Receipt, numbers, numbers, numbers, counts, counts, counts, counts,
            st.binary(max_size=FRAMES_AHEAD // 8),
        ),
    )
)  # fmt: skip
def test_notes_survive_the_wire_and_damage_is_found(note):
    data = encode_note(note)
    assert parse_note(data) == note
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 64
        with pytest.raises(WireError):
            parse_note(damaged)


def test_a_receipt_names_the_frames_that_have_come():
    receiver = Receiver((RUN, EPOCH, 0), WINDOW)
    for sequence in (0, 1, 4, 13):
        receiver.accept(frame(Ticket(sequence, sequence, sequence)), 0.0)
    receipt = receiver.receipt()
    assert [s for s in range(20) if receipt.has(s)] == [0, 1, 4, 13]
    assert (receipt.low, receipt.turn) == (2, 14)
    assert not replace(receipt, beyond=b"").has(4)
