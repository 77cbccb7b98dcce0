"""The cache of profiles: what goes in comes out, and nothing in it can hurt a run."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.profile_cache import (
    MAX_FILE_BYTES,
    MAX_STAGES,
    ProfileCache,
    StageTime,
    Subject,
    cache_folder,
)
from edgetrain.errors import ConfigError
from edgetrain.op_groups import Amount, LayerFeatures, OpGroup
from edgetrain.planner.latency_model import LatencyModel
from edgetrain.wire.hello import Hello
from tests.device_profiles import profile

PI = Hello("pi", "s1", "1", "ort 1.22", ("CPU",), "auto", 10**9, 5e9, 4)
LENET = Subject("ab" * 32, 8)
STAGE = StageTime(0, 4, "vjp", False, 1e-3, 2e-3)
WORK = LayerFeatures({OpGroup.DENSE: Amount(1e8, 1e6, 4)}, {}, 100)


def changed(hello: Hello = PI, **changes: object) -> Hello:
    return msgspec.structs.replace(hello, **changes)


def test_stage_times_come_back(tmp_path):
    ProfileCache(tmp_path / "new").keep_stages(PI, LENET, [STAGE])
    assert ProfileCache(tmp_path / "new").stages(PI, LENET) == (STAGE,)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".json"]


def test_a_new_start_of_the_same_device_is_the_same_device(tmp_path):
    cache = ProfileCache(tmp_path)
    cache.keep_stages(PI, LENET, [STAGE])
    again = changed(session="s2", memory_bytes=1, flop_per_s=1.2 * PI.flop_per_s)
    assert cache.stages(again, LENET) == (STAGE,)


@pytest.mark.parametrize(
    "other",
    [
        changed(device="pi-2"),
        changed(engine="ort 1.23"),
        changed(version="2"),
        changed(cores=8),
        changed(block=16),
        changed(runs=("weights",)),
        changed(profile=profile()),
        changed(flop_per_s=PI.flop_per_s / 4),
        changed(flop_per_s=math.nan),
    ],
)
def test_another_device_or_speed_is_unknown(tmp_path, other):
    cache = ProfileCache(tmp_path)
    cache.keep_stages(PI, LENET, [STAGE])
    cache.keep_model(PI, LatencyModel.of_speed(1e9))
    assert cache.stages(other, LENET) == ()
    assert cache.model(other) is None


@pytest.mark.parametrize(
    "other",
    [
        Subject("cd" * 32, 8),
        Subject(LENET.model_sha256, 4),
        Subject("ab" * 32, 8, "last:1"),
    ],
)
def test_another_model_or_microbatch_is_unknown(tmp_path, other):
    cache = ProfileCache(tmp_path)
    cache.keep_stages(PI, LENET, [STAGE])
    assert cache.stages(PI, other) == ()


def test_a_newer_time_takes_the_place_of_an_older(tmp_path):
    cache = ProfileCache(tmp_path)
    newer = msgspec.structs.replace(STAGE, forward_s=5e-3)
    last = msgspec.structs.replace(STAGE, start=4, stop=9, fused=True)
    cache.keep_stages(PI, LENET, [STAGE, last])
    cache.keep_stages(PI, LENET, [newer])
    assert cache.stages(PI, LENET) == (last, newer)


def test_the_latest_stages_are_kept(tmp_path):
    cache = ProfileCache(tmp_path)
    many = [StageTime(n, n + 1, "vjp", False, 1e-3, 0) for n in range(MAX_STAGES + 10)]
    cache.keep_stages(PI, LENET, many)
    assert cache.stages(PI, LENET) == tuple(many[10:])


def test_what_was_learnt_comes_back(tmp_path):
    model = LatencyModel.of(profile()).learn(WORK, 3e-2, 0)
    cache = ProfileCache(tmp_path)
    assert cache.model(PI) is None
    cache.keep_model(PI, model)
    found = cache.model(PI)
    assert found is not None
    assert found.forward_s(WORK) == pytest.approx(model.forward_s(WORK))
    assert found.measurements == model.measurements


def test_the_best_that_is_known_predicts(tmp_path):
    cache = ProfileCache(tmp_path)
    by_speed = LatencyModel.of_speed(PI.flop_per_s).forward_s(WORK)
    by_profile = LatencyModel.of(profile()).forward_s(WORK)
    whole = changed(profile=profile())
    assert cache.latency(PI).forward_s(WORK) == by_speed
    assert cache.latency(whole).forward_s(WORK) == by_profile
    cache.keep_model(whole, cache.latency(whole).learn(WORK, 9 * by_profile, 0))
    assert cache.latency(whole).forward_s(WORK) > 8 * by_profile
    assert cache.latency(PI).forward_s(WORK) == by_speed
    with pytest.raises(ConfigError, match="flop_per_s"):
        cache.latency(changed(flop_per_s=0.0))


def test_switched_off_it_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = ProfileCache(None)
    cache.keep_stages(PI, LENET, [STAGE])
    cache.keep_model(PI, LatencyModel.of_speed(1e9))
    assert cache.stages(PI, LENET) == ()
    assert cache.model(PI) is None
    assert not list(tmp_path.iterdir())


def test_the_oldest_files_go(tmp_path):
    cache = ProfileCache(tmp_path, max_files=3)
    for n in range(5):
        cache.keep_stages(PI, Subject("ab", n + 1), [STAGE])
        for path in tmp_path.iterdir():  # a clock may be coarser than these writes
            os.utime(path, (path.stat().st_mtime - 10,) * 2)
    kept = [n + 1 for n in range(5) if cache.stages(PI, Subject("ab", n + 1))]
    assert kept == [3, 4, 5]


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff", b"null", b"[" * 100_000, b" " * (MAX_FILE_BYTES + 1)],
)
def test_a_damaged_file_is_ignored_with_a_warning(tmp_path, data, caplog):
    cache = ProfileCache(tmp_path)
    cache.keep_stages(PI, LENET, [STAGE])
    only(tmp_path).write_bytes(data)
    assert cache.stages(PI, LENET) == ()
    assert str(only(tmp_path)) in caplog.text
    cache.keep_stages(PI, LENET, [STAGE])
    assert cache.stages(PI, LENET) == (STAGE,)


def test_a_damaged_model_is_ignored_with_a_warning(tmp_path, caplog):
    cache = ProfileCache(tmp_path)
    cache.keep_model(PI, LatencyModel.of_speed(1e9))
    table = msgspec.json.decode(only(tmp_path).read_bytes())
    table["model"]["weighted"] = [1.0]
    only(tmp_path).write_bytes(msgspec.json.encode(table))
    assert cache.model(PI) is None
    assert "learnt of pi is ignored" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"start": -1},
        {"start": 9},
        {"forward_s": -1},
        {"backward_s": 1e9},
        {"mode": 3},
    ],
)
def test_stage_times_that_cannot_be_are_ignored(tmp_path, change, caplog):
    cache = ProfileCache(tmp_path)
    cache.keep_stages(PI, LENET, [STAGE])
    table = msgspec.json.decode(only(tmp_path).read_bytes())
    table["stages"][0] |= change
    only(tmp_path).write_bytes(msgspec.json.encode(table))
    assert cache.stages(PI, LENET) == ()
    assert "is ignored" in caplog.text


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_no_damage_gets_through(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cache")
    cache = ProfileCache(folder)
    cache.keep_stages(PI, LENET, [STAGE])
    text = bytearray(only(folder).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    only(folder).write_bytes(bytes(text))
    for stage in cache.stages(PI, LENET):
        assert stage.forward_s >= 0


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_bytes(b"")
    cache = ProfileCache(tmp_path / "file" / "cache")
    cache.keep_stages(PI, LENET, [STAGE])
    assert "is not cached" in caplog.text
    assert cache.stages(PI, LENET) == ()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"EDGETRAIN_CACHE": "off", "HOME": "/h"}, None),
        ({"EDGETRAIN_CACHE": "/c", "HOME": "/h"}, Path("/c")),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, Path("/x/edgetrain/profiles")),
        ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, Path("/h/.cache/edgetrain/profiles")),
        ({"HOME": "/h"}, Path("/h/.cache/edgetrain/profiles")),
        ({}, None),
    ],
)
def test_where_the_cache_is(environment, expected):
    assert cache_folder(environment) == expected
