"""A profile survives its file and the wire, and a bad one is refused in words."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.device_profile import MAX_CASES, MAX_FILE_BYTES, DeviceProfile, LinkProfile
from edgetrain.errors import ConfigError, WireError
from edgetrain.op_groups import (
    Amount,
    LayerFeatures,
    OpGroup,
    stage_features,
    update_amount,
)
from edgetrain.wire.hello import Hello
from edgetrain.wire.messages import decode_hello, encode
from tests.device_profiles import profile

WHOLE = profile(link=LinkProfile(1e-3, 5e7), weights_as_inputs={"dense": 1.2}, date="now")


def hello(found: DeviceProfile | None) -> Hello:
    return Hello("pi", "s", "1", "ort", ("CPU",), "auto", 1, 1.0, 1, profile=found)


def test_a_file_gives_the_same_profile(tmp_path):
    path = tmp_path / "pi.json"
    path.write_bytes(WHOLE.encode())
    assert DeviceProfile.load(path) == WHOLE
    assert DeviceProfile.load(path).fingerprint == WHOLE.fingerprint


def test_the_fingerprint_is_of_everything():
    assert profile().fingerprint == profile().fingerprint
    assert profile(threads=2).fingerprint != profile().fingerprint


def test_a_presence_carries_it():
    assert decode_hello(encode(hello(WHOLE))) == hello(WHOLE)
    assert decode_hello(encode(hello(None))).profile is None


def test_a_presence_with_a_bad_one_is_no_presence():
    data = msgspec.msgpack.decode(encode(hello(WHOLE)))
    for value in (math.nan, math.inf, -1.0, 0.0):
        data["profile"]["link"]["bytes_per_s"] = value
        with pytest.raises(WireError, match="bytes_per_s"):
            decode_hello(msgspec.msgpack.encode(data))


def test_a_presence_stays_small():
    assert len(encode(hello(WHOLE))) < 20_000


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        (("format",), 2, "format 2"),
        (("threads",), 0, "threads"),
        (("cores",), -1, "cores"),
        (("memory_bytes",), 0, "memory_bytes"),
        (("run_overhead_s",), 0, "run_overhead_s"),
        (("device",), "x" * 1000, "device"),
        (("engine",), "a\nb", "engine"),
        (("cases",), [], "cases"),
        (("cases", 0, "forward_s"), 0, "forward_s"),
        (("cases", 0, "forward_s"), 1e9, "forward_s"),
        (("cases", 0, "backward_s"), -1, "backward_s"),
        (("cases", 0, "flop"), -1, "flop"),
        (("cases", 0, "batch"), 0, "batch"),
        (("cases", 0, "name"), "dense-1", "same name"),
        (("weights_as_inputs",), {"dense": 0}, "weights_as_inputs"),
        (("link", "latency_s"), -1, "latency_s"),
        (("link", "bytes_per_s"), 0, "bytes_per_s"),
        (("spinning",), "yes", "spinning"),
    ],
)
def test_a_value_out_of_range_is_named(path, value, word):
    data = msgspec.json.decode(WHOLE.encode())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ConfigError, match=word) as caught:
        DeviceProfile.decode(msgspec.json.encode(data), place="pi.json")
    assert str(caught.value).startswith("pi.json: ")
    assert "edgetrain-agent probe" in str(caught.value)


def test_too_many_cases_are_refused():
    many = [msgspec.structs.replace(WHOLE.cases[0], batch=n + 1) for n in range(1000)]
    with pytest.raises(ValueError, match=f"1 to {MAX_CASES}"):
        msgspec.structs.replace(WHOLE, cases=tuple(many))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_what_is_no_profile_is_refused(data):
    with pytest.raises(ConfigError, match="not a device's profile"):
        DeviceProfile.decode(data)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_a_damaged_file_is_refused_or_read(data):
    text = bytearray(WHOLE.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        DeviceProfile.decode(bytes(text))
    except ConfigError:
        return


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        DeviceProfile.load(tmp_path / "none.json")
    (tmp_path / "large.json").write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="over"):
        DeviceProfile.load(tmp_path / "large.json")


def test_a_device_held_back_takes_longer_in_everything():
    slow = WHOLE.slowed(0.25)
    assert slow.run_overhead_s == 4 * WHOLE.run_overhead_s
    for case, fast in zip(slow.cases, WHOLE.cases, strict=True):
        assert case.forward_s == 4 * fast.forward_s
        assert case.backward_s == 4 * fast.backward_s
        assert case.amount == fast.amount
    assert slow.link == WHOLE.link


def test_features_of_a_stage_are_the_sums_of_its_layers():
    one = LayerFeatures({OpGroup.DENSE: Amount(2, 3, 1)}, {}, 5)
    two = LayerFeatures(
        {OpGroup.DENSE: Amount(1, 1, 1), OpGroup.POOLING: Amount(4, 4, 1)},
        {OpGroup.POOLING: Amount(4, 4, 1)},
    )
    assert stage_features([]) == LayerFeatures()
    assert stage_features([one, two]) == LayerFeatures(
        {OpGroup.DENSE: Amount(3, 4, 2), OpGroup.POOLING: Amount(4, 4, 1)},
        {OpGroup.POOLING: Amount(4, 4, 1)},
        5,
    )


def test_an_unknown_optimizer_is_refused():
    assert update_amount("adam", 10).nbytes > update_amount("sgd", 10).nbytes
    with pytest.raises(ConfigError, match="'lion'"):
        update_amount("lion", 1)
