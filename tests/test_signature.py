"""Signed commands: all but the coordinator's newest word to this device is refused."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import ConfigError, SignatureError
from edgetrain.wire.messages import Train, decode_command, encode
from edgetrain.wire.signature import Signed, Signer, Verifier, make_key

PRIVATE, PUBLIC = make_key()
OTHER = make_key()[1]
FINGERPRINT = Verifier(PUBLIC, "", "").fingerprint
COMMAND = encode(Train(1, 0, 5))


def clock():
    return itertools.count(1_000_000).__next__


def verifier(device: str = "pi", session: str = "s1") -> Verifier:
    return Verifier(PUBLIC, device, session)


def test_a_signed_command_comes_through_as_it_was():
    signer, checks = Signer(PRIVATE, clock()), verifier()
    assert signer.fingerprint == checks.fingerprint
    for step in range(3):
        command = encode(Train(1, 0, step))
        opened = checks.open(signer.sign(command, "pi", "s1"))
        assert decode_command(opened) == Train(1, 0, step)


@given(st.binary(max_size=200), st.text(max_size=20), st.text(max_size=20))
@settings(max_examples=50, deadline=None)
def test_only_that_device_in_that_session_takes_it(command, device, session):
    signed = Signer(PRIVATE, clock()).sign(command, device, session)
    assert Verifier(PUBLIC, device, session).open(signed) == command
    for other in (
        Verifier(PUBLIC, device + "x", session),
        Verifier(PUBLIC, device, session + "x"),
        Verifier(PUBLIC, device + session, ""),
        Verifier(OTHER, device, session),
    ):
        mine = (other._device, other._session) == (device, session)
        if not (mine and other.fingerprint == FINGERPRINT):
            with pytest.raises(SignatureError):
                other.open(signed)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_altered_byte_is_noticed(data):
    signed = bytearray(Signer(PRIVATE, clock()).sign(COMMAND, "pi", "s1"))
    place = data.draw(st.integers(0, len(signed) - 1))
    signed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(SignatureError):
        verifier().open(bytes(signed))


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_garbage_is_refused_and_changes_nothing(garbage):
    checks, signer = verifier(), Signer(PRIVATE, clock())
    for bad in (garbage, COMMAND, msgspec.msgpack.encode(Signed(COMMAND, 9**9, garbage))):
        with pytest.raises(SignatureError):
            checks.open(bad)
    assert checks.open(signer.sign(COMMAND, "pi", "s1")) == COMMAND


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_of_a_replay_in_any_order_only_what_is_newer_counts(order):
    signer, checks = Signer(PRIVATE, clock()), verifier()
    sent = [signer.sign(bytes([k]), "pi", "s1") for k in range(10)]
    newest = -1
    for k in order:
        if k > newest:
            assert checks.open(sent[k]) == bytes([k])
            newest = k
        else:
            with pytest.raises(SignatureError, match="not newer"):
                checks.open(sent[k])


def test_a_later_run_counts_on_from_an_earlier_one_even_if_the_clock_stands():
    stopped = Signer(PRIVATE, lambda: 7)
    checks = verifier()
    for _ in range(3):
        checks.open(stopped.sign(COMMAND, "pi", "s1"))
    later = Signer(PRIVATE, lambda: 1_000)
    checks.open(later.sign(COMMAND, "pi", "s1"))
    with pytest.raises(SignatureError, match="clock"):
        checks.open(Signer(PRIVATE, lambda: 8).sign(COMMAND, "pi", "s1"))


@pytest.mark.parametrize("bad", [b"", b"junk", PUBLIC, PRIVATE.replace(b"M", b"N")])
def test_a_signing_key_that_is_none_is_said(bad):
    with pytest.raises(ConfigError, match="signing key"):
        Signer(bad, clock())


@pytest.mark.parametrize("bad", [b"", b"junk", PRIVATE])
def test_a_public_key_that_is_none_is_said(bad):
    with pytest.raises(ConfigError, match="public key"):
        Verifier(bad, "pi", "s1")
