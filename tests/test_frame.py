"""Laws of frames and their reassembly."""

import struct
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import ChecksumError, FrameTooLargeError, WireError
from edgetrain.wire.frame import (
    DEFAULT_CHUNK_BYTES,
    HEADER_BYTES,
    Address,
    Kind,
    frames,
    parse,
    wire_bytes,
)
from edgetrain.wire.reassembly import Message, Reassembler

LIMIT = 1 << 24
untimed = settings(deadline=None, derandomize=True)
HERE = Address(Kind.ACTIVATION, run=1, epoch=2, stage=3, step=4, microbatch=5, tensor=6)
DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", ml_dtypes.bfloat16,
]  # fmt: skip

u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
addresses = st.builds(
    Address,
    kind=st.sampled_from(Kind),
    run=u32,
    epoch=u32,
    stage=u16,
    step=u32,
    microbatch=u32,
    tensor=u16,
    evaluation=st.booleans(),
)


def receive(datas, reassembler=None) -> list[Message]:
    reassembler = reassembler or Reassembler(LIMIT)
    fed = (reassembler.feed(parse(data, max_body_bytes=LIMIT)) for data in datas)
    return [message for message in fed if message is not None]


def sealed(frame: bytearray) -> bytearray:
    """The frame with its checksum made right again."""
    body = zlib.crc32(frame[HEADER_BYTES:], zlib.crc32(frame[: HEADER_BYTES - 4]))
    struct.pack_into("<I", frame, HEADER_BYTES - 4, body)
    return frame


@untimed
@given(addresses, st.binary(max_size=300), st.integers(1, 120), st.randoms())
def test_bytes_come_back_from_any_order_and_duplicates(address, body, chunk_bytes, rng):
    sent = list(frames(address, body, chunk_bytes=chunk_bytes))
    last = sent.pop(rng.randrange(len(sent)))
    sent += sent
    rng.shuffle(sent)
    (message,) = receive([*sent, last])
    assert message.address == address
    assert (message.dtype, bytes(message.body)) == ("", body)


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("multiple", [1, 2, 7])
def test_every_byte_is_sent_once_at_the_chunk_edges(extra, multiple):
    body = np.random.default_rng(0).bytes(50 * multiple + extra)
    parsed = [parse(f, max_body_bytes=50) for f in frames(HERE, body, chunk_bytes=50)]
    assert b"".join(bytes(f.body) for f in parsed) == body
    assert [f.chunk for f in parsed] == list(range(parsed[0].chunks))
    assert sum(HEADER_BYTES + f.body.nbytes for f in parsed) == wire_bytes(len(body), 50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)])
def test_arrays_of_every_type_come_back_equal(dtype, shape):
    values = np.random.default_rng(0).integers(0, 2, size=shape)
    array = np.asarray(values).astype(dtype)
    (message,) = receive(frames(HERE, array, chunk_bytes=16))
    back = message.array(shape)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    "lay",
    [
        lambda a: a.T,
        lambda a: a[::2, 1::3],
        lambda a: a[::-1],
        lambda a: np.asfortranarray(a),
        lambda a: a.astype(">f4"),
    ],
)
def test_layout_and_byte_order_do_not_matter(lay):
    array = lay(np.random.default_rng(0).normal(size=(8, 9)).astype(np.float32))
    (message,) = receive(frames(HERE, array, chunk_bytes=100))
    np.testing.assert_array_equal(message.array(array.shape), array)


@pytest.mark.parametrize("dtype", ["U3", "complex64", "datetime64[s]"])
def test_types_without_a_code_are_refused(dtype):
    with pytest.raises(WireError, match="cannot be sent"):
        list(frames(HERE, np.zeros(3, dtype), chunk_bytes=10))


def test_an_address_too_large_for_the_header_is_refused():
    with pytest.raises(WireError, match="does not fit"):
        list(frames(Address(Kind.WEIGHTS, 2**32, 0, 0), b"", chunk_bytes=1))


def test_one_frame_passes_without_a_copy_and_a_frame_is_not_aliased():
    array = np.arange(4, dtype=np.float32)
    (frame,) = frames(HERE, array, chunk_bytes=100)
    array[:] = -1
    (message,) = receive([frame])
    assert message.array((4,)).tolist() == [0, 1, 2, 3]
    frame[HEADER_BYTES:] = np.full(4, 9, np.float32).tobytes()
    assert message.array((4,)).tolist() == [9, 9, 9, 9]


@untimed
@given(
    st.integers(0, 4 * DEFAULT_CHUNK_BYTES), st.sampled_from([1 << 15, 1 << 16, 1 << 18])
)
def test_no_piece_but_a_last_one_is_just_above_64_kib(nbytes, chunk_bytes):
    body = bytes(nbytes)
    sizes = [len(f) - HEADER_BYTES for f in frames(HERE, body, chunk_bytes=chunk_bytes)]
    assert max(sizes) <= chunk_bytes
    assert not any(60_000 < size < 80_000 for size in sizes[:-1] or sizes)
    assert sum(sizes) + HEADER_BYTES * len(sizes) == wire_bytes(nbytes, chunk_bytes)


@untimed
@given(addresses, st.binary(max_size=60), st.data())
def test_any_flipped_bit_is_noticed(address, body, data):
    frame = next(frames(address, body, chunk_bytes=32))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        parse(frame, max_body_bytes=64)


def test_a_damaged_body_is_a_checksum_error():
    (frame,) = frames(HERE, b"body", chunk_bytes=10)
    frame[-1] ^= 1
    with pytest.raises(ChecksumError):
        parse(frame, max_body_bytes=10)


@untimed
@given(st.binary(max_size=60), st.data())
def test_any_truncation_or_surplus_is_noticed(body, data):
    frame = bytes(next(frames(HERE, body, chunk_bytes=64)))
    cut = data.draw(st.integers(0, len(frame) - 1))
    for damaged in (frame[:cut], frame + frame[: cut + 1]):
        with pytest.raises(WireError):
            parse(damaged, max_body_bytes=1000)


@untimed
@given(st.binary(max_size=200), st.data())
def test_hostile_fields_raise_only_wire_errors(noise, data):
    """Random header fields behind a right magic, length and checksum."""
    reassembler = Reassembler(1000, max_open=2)
    for _ in range(3):
        frame = bytearray(
            data.draw(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
        )
        valid = next(frames(HERE, noise, chunk_bytes=50))
        keep = data.draw(st.sets(st.sampled_from([8, 16, 24, 32, 36, 40, 48, 56])))
        frame += noise[:50]
        frame[:8] = valid[:8]
        frame[28:32] = valid[28:32]
        for start in keep:
            frame[start : start + 4] = valid[start : start + 4]
        struct.pack_into("<I", frame, HEADER_BYTES - 8, len(frame) - HEADER_BYTES)
        try:
            reassembler.feed(parse(sealed(frame), max_body_bytes=1000))
        except WireError:
            continue
        assert reassembler.open_bytes <= 1000


@untimed
@given(st.binary(max_size=300))
def test_random_bytes_are_not_frames(data):
    with pytest.raises(WireError):
        parse(data, max_body_bytes=1000)


@pytest.mark.parametrize(
    ("at", "layout", "value", "what"),
    [
        (0, "<I", 1, "version"),
        (4, "<B", 9, "version"),
        (5, "<B", 0, "kind"),
        (6, "<H", 2, "flags"),
        (28, "<B", 200, "type"),
        (29, "<B", 1, "codec"),
        (30, "<H", 1, "flags"),
        (48, "<I", 2, "chunk"),
        (52, "<I", 0, "chunk"),
        (52, "<I", 2**32 - 1, "chunk"),
        (56, "<Q", 2**63, "chunk"),
        (64, "<Q", 2**63, "chunk"),
    ],
)
def test_each_field_is_checked(at, layout, value, what):
    frame = next(frames(HERE, bytes(10), chunk_bytes=5))
    struct.pack_into(layout, frame, at, value)
    with pytest.raises(WireError, match=what):
        parse(sealed(frame), max_body_bytes=10)


def test_a_body_over_the_limit_is_refused_before_anything_else():
    frame = next(frames(HERE, bytes(11), chunk_bytes=11))
    with pytest.raises(FrameTooLargeError, match="limit 10 B"):
        parse(frame, max_body_bytes=10)


def test_a_message_over_the_limit_is_refused_at_its_first_frame():
    frame = next(frames(HERE, bytes(100), chunk_bytes=10))
    with pytest.raises(FrameTooLargeError, match="limit is 99 B"):
        Reassembler(99).feed(parse(frame, max_body_bytes=10))


def test_frames_that_disagree_are_refused_and_the_message_survives():
    good = list(frames(HERE, b"0123456789", chunk_bytes=5))
    reassembler = Reassembler(100)
    assert receive(good[:1], reassembler) == []
    for other, chunk_bytes in ((bytes(12), 6), (bytes(10), 3), (np.zeros(10, "i1"), 5)):
        for frame in frames(HERE, other, chunk_bytes=chunk_bytes):
            with pytest.raises(WireError, match="disagree"):
                receive([frame], reassembler)
    (message,) = receive(good[1:], reassembler)
    assert bytes(message.body) == b"0123456789"


def test_unfinished_messages_are_bounded_in_number_and_bytes_oldest_first():
    reassembler = Reassembler(100, max_open=3)
    started = [
        list(frames(Address(Kind.LABELS, 0, 0, 0, step=i), bytes(20), chunk_bytes=10))
        for i in range(5)
    ]
    for first, _ in started:
        receive([first], reassembler)
        assert reassembler.open_bytes <= 60
    assert reassembler.dropped == 2
    done = receive([last for _, last in started[2:]], reassembler)
    assert [m.address.step for m in done] == [2, 3, 4]
    assert reassembler.open_bytes == 0

    large = Address(Kind.BUNDLE, 0, 0, 0)
    receive([started[0][0]], reassembler)
    receive([next(frames(large, bytes(90), chunk_bytes=50))], reassembler)
    assert (reassembler.open_bytes, reassembler.dropped) == (90, 3)


def test_many_messages_interleaved_come_back_whole():
    rng = np.random.default_rng(7)
    bodies = {i: rng.bytes(rng.integers(200)) for i in range(20)}
    sent = [
        frame
        for i, body in bodies.items()
        for frame in frames(Address(Kind.COTANGENT, 0, 0, 0, i), body, chunk_bytes=17)
    ]
    rng.shuffle(sent)
    back = {m.address.step: bytes(m.body) for m in receive(sent)}
    assert back == bodies


def test_a_shape_that_does_not_fit_is_refused():
    (message,) = receive(frames(HERE, np.zeros(6, np.float32), chunk_bytes=100))
    with pytest.raises(WireError, match="float32"):
        message.array((7,))
    (message,) = receive(frames(HERE, b"123", chunk_bytes=100))
    with pytest.raises(WireError, match="cannot be sent"):
        message.array((3,))
