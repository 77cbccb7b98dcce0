"""Every control message survives the wire, and other bytes are a WireError."""

from __future__ import annotations

import types
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.codec_spec import NAMES, CodecSpec
from edgetrain.device_profile import DeviceProfile, LinkProfile
from edgetrain.errors import WireError
from edgetrain.wire.hello import Hello
from edgetrain.wire.messages import (
    MAX_MESSAGE_BYTES,
    Command,
    Fetch,
    Release,
    Report,
    decode_command,
    decode_hello,
    decode_report,
    encode,
)
from tests.device_profiles import profile

COMMANDS = typing.get_args(Command)
REPORTS = typing.get_args(Report)
FUZZ = settings(max_examples=200)

PLAIN = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
    CodecSpec: st.builds(CodecSpec, st.sampled_from(NAMES)),
    DeviceProfile: st.just(profile(link=LinkProfile(1e-3, 5e7))),
}


def values(kind: object) -> st.SearchStrategy:
    """Any value of an annotated type."""
    if kind in PLAIN:
        return PLAIN[kind]
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and arguments[-1:] == (...,):
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if typing.get_origin(kind) is tuple:
        return st.tuples(*map(values, arguments))
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return st.one_of(*map(values, arguments))
    hints = typing.get_type_hints(kind)
    fields = {name: values(hints[name]) for name in kind.__struct_fields__}
    return st.builds(kind, **fields)


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
@settings(max_examples=30)
@given(st.data())
def test_commands_round_trip(kind, data):
    message = data.draw(values(kind))
    assert decode_command(encode(message)) == message


@pytest.mark.parametrize("kind", REPORTS, ids=lambda kind: kind.__name__)
@settings(max_examples=30)
@given(st.data())
def test_reports_round_trip(kind, data):
    message = data.draw(values(kind))
    assert decode_report(encode(message)) == message


@settings(max_examples=30)
@given(values(Hello))
def test_presences_round_trip(hello):
    assert decode_hello(encode(hello)) == hello


def test_each_message_has_a_tag_of_its_own():
    kinds = (*COMMANDS, *REPORTS, Hello)
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert len(set(tags)) == len(kinds)
    assert None not in tags


@pytest.mark.parametrize("decode", [decode_command, decode_report, decode_hello])
@FUZZ
@given(st.binary(max_size=200))
def test_any_bytes_are_a_wire_error(decode, data):
    with pytest.raises(WireError, match="not a control message"):
        decode(data)


@pytest.mark.parametrize("decode", [decode_command, decode_report, decode_hello])
@FUZZ
@given(st.one_of(*map(values, (*COMMANDS, *REPORTS))), st.data())
def test_a_damaged_message_is_a_message_or_a_wire_error(decode, message, data):
    damaged = bytearray(encode(message))
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(damaged[: data.draw(st.integers(1, len(damaged)))]))
    except WireError:
        return
    assert isinstance(found, (*COMMANDS, *REPORTS, Hello))


def test_a_command_is_no_report_and_no_presence():
    data = encode(Fetch(1, 0, 3))
    assert decode_command(data) == Fetch(1, 0, 3)
    for decode in (decode_report, decode_hello):
        with pytest.raises(WireError):
            decode(data)


def test_a_message_over_the_limit_is_not_even_parsed():
    fits = encode(Release(1, 0, "x" * (MAX_MESSAGE_BYTES - 100)))
    assert isinstance(decode_command(fits), Release)
    data = encode(Release(1, 0, "x" * MAX_MESSAGE_BYTES))
    with pytest.raises(WireError, match=r"message of \d+ B"):
        decode_command(data)


def test_an_older_message_without_the_new_fields_is_understood():
    """Fields with defaults may be left out, and unknown ones are passed over."""
    hello = Hello("pi", "s", "1", "onnxruntime", (), "auto", 1, 1.0, 1)
    fields = msgspec.msgpack.decode(encode(hello))
    del fields["datasets"]
    fields["later"] = 1
    assert decode_hello(msgspec.msgpack.encode(fields)) == hello


def test_text_that_is_no_text_is_a_wire_error():
    data = bytearray(encode(Release(1, 0, "zzzz")))
    data[-1] = 0xFF
    with pytest.raises(WireError):
        decode_command(bytes(data))
