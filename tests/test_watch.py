"""Smartwatch recordings train a net on three agents and never leave the first of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from inputs import cached
from onnx import helper
from small_models import build, normal
from training import Wire, train

from coordinator.session import Outcome
from edgetrain.config import (
    DataConfig,
    FleetConfig,
    ModelConfig,
    RunConfig,
)
from edgetrain.plan_config import PinConfig, PlanConfig
from edgetrain.sim.fleet import SimDevice
from edgetrain.train_config import TrainConfig
from edgetrain.wire.frame import Kind
from edgetrain.wire.topics import COORDINATOR

HELD_OUT_PEOPLE = (8, 9)
DEVICES = ("watch", "phone", "hub")
_START_BITS = 24
_ODD = np.uint64(0x9E3779B97F4A7C15)
PIECE_FLOATS = 16  # 64 bytes in a row of a sample are a leak
TRAIN = TrainConfig(
    epochs=6,
    batch_size=64,
    microbatches=2,
    optimizer="adam",
    lr=0.01,
    lr_schedule="cosine",
    clip_norm=1.0,
)


def network() -> onnx.ModelProto:
    """A 1-D CNN from ``x`` [N, 6, 100] to ``y`` [N, 7]; cuts ``r1`` and ``r2``."""
    node = helper.make_node
    weights = {
        "w1": normal(16, 6, 7) * (2 / 42) ** 0.5,
        "b1": np.zeros(16, np.float32),
        "w2": normal(32, 16, 5, seed=1) * (2 / 80) ** 0.5,
        "b2": np.zeros(32, np.float32),
        "w3": normal(7, 32, seed=2) * (1 / 32) ** 0.5,
        "b3": np.zeros(7, np.float32),
    }
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], pads=[3, 3], strides=[2]),
        node("Relu", ["c1"], ["r1"]),
        node("Conv", ["r1", "w2", "b2"], ["c2"], pads=[2, 2], strides=[2]),
        node("Relu", ["c2"], ["r2"]),
        node("GlobalAveragePool", ["r2"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("Gemm", ["f", "w3", "b3"], ["y"], transB=1),
    ]
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    return build(nodes, [("x", ["N", 6, 100])], ["y"], weights)


class Pieces:
    """The 64-byte pieces that rows of samples are made of, to look for in other bytes.

    A copy of 124 bytes or more of a row holds a whole piece. What starts with the same
    bits as some piece is compared with all of them; pieces of one repeated value say
    nothing and are left out.

    Args:
        samples: float32 [samples, channels, length].
    """

    def __init__(self, samples: np.ndarray) -> None:
        usable = samples.shape[2] // PIECE_FLOATS * PIECE_FLOATS
        pieces = np.ascontiguousarray(samples[:, :, :usable]).reshape(-1, PIECE_FLOATS)
        telling = pieces[np.ptp(pieces, axis=1) > 0]
        self._pieces = {piece.tobytes() for piece in telling}
        self._starts = np.zeros(1 << _START_BITS, np.bool_)
        self._starts[_start(np.ascontiguousarray(telling[:, :2]).view(np.uint64))] = True

    def found_in(self, data: bytes) -> int:
        """How many pieces occur in the bytes, at whatever offset."""
        return sum(self._at(data, shift) for shift in range(8))

    def _at(self, data: bytes, shift: int) -> int:
        count = (len(data) - shift) // 8
        if count < 1:
            return 0
        words = np.frombuffer(data, np.uint64, count, shift)
        hits = np.flatnonzero(self._starts[_start(words)])
        size = 4 * PIECE_FLOATS
        offsets = (shift + 8 * int(hit) for hit in hits)
        return sum(data[offset : offset + size] in self._pieces for offset in offsets)


def _start(words: np.ndarray) -> np.ndarray:
    """A few bits of each 8-byte word, all of which count."""
    return (words * _ODD) >> np.uint64(64 - _START_BITS)


@dataclass(frozen=True)
class Recordings:
    """Files of the training and the held-out people, the model, and all their windows."""

    train: Path
    eval: Path
    model: Path
    pieces: Pieces


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    folder = tmp_path_factory.mktemp("watch")
    with np.load(cached("watch.npz")) as arrays:
        x, labels, person = arrays["x"], arrays["labels"], arrays["person"]
    held_out = np.isin(person, HELD_OUT_PEOPLE)
    paths = folder / "train.npz", folder / "eval.npz", folder / "model.onnx"
    for path, rows in zip(paths, (~held_out, held_out), strict=False):
        np.savez(path, x=x[rows], labels=labels[rows])
    onnx.save(network(), paths[2])
    return Recordings(*paths, Pieces(x))


def run_config(recordings: Recordings, data: DataConfig, train: TrainConfig) -> RunConfig:
    return RunConfig(
        ModelConfig(recordings.model),
        data,
        train,
        PlanConfig(cuts=("r1", "r2"), pin=PinConfig(first="watch", last="hub")),
        FleetConfig(devices=DEVICES),
    )


def leaks(pieces: Pieces, payloads: Iterable[bytes]) -> int:
    return sum(pieces.found_in(payload) for payload in payloads)


@pytest.fixture(scope="module")
def private(
    recordings: Recordings, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, Wire]:
    """A run on samples and labels that stay on the watch."""
    files = {"exercises": (recordings.train, recordings.eval)}
    devices = [SimDevice("watch", datasets=files), SimDevice("phone"), SimDevice("hub")]
    data = DataConfig(device="watch", dataset="exercises")
    wire = Wire()
    out = tmp_path_factory.mktemp("private") / "run"
    outcome = train(run_config(recordings, data, TRAIN), out, devices, wire=wire)
    return outcome, wire


def test_it_learns_the_exercises_of_people_it_has_not_seen(
    private: tuple[Outcome, Wire],
) -> None:
    outcome, _ = private
    assert outcome.score is not None
    print(f"held-out people: {outcome.score}")  # noqa: T201 - shown with pytest -s
    assert outcome.score.samples == 1002
    assert outcome.score.accuracy > 0.8


def test_no_sample_leaves_the_watch(
    recordings: Recordings, private: tuple[Outcome, Wire]
) -> None:
    _, wire = private
    payloads = [sent.payload for sent in wire.messages if sent.source == "watch"]
    assert sum(map(len, payloads)) > 10e6
    assert leaks(recordings.pieces, payloads) == 0


def test_the_coordinator_gets_weights_and_reports_only(
    private: tuple[Outcome, Wire],
) -> None:
    _, wire = private
    kinds = {sent.frame.address.kind for sent in wire.data() if sent.to == COORDINATOR}
    assert kinds == {Kind.WEIGHTS}
    kinds = {sent.frame.address.kind for sent in wire.data() if sent.source == COORDINATOR}
    assert kinds == {Kind.BUNDLE}


def test_no_sample_is_in_the_run_folder(
    recordings: Recordings, private: tuple[Outcome, Wire]
) -> None:
    outcome, _ = private
    files = [path for path in outcome.folder.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert leaks(recordings.pieces, (path.read_bytes() for path in files)) == 0


def test_the_search_finds_samples_that_the_coordinator_sends(
    recordings: Recordings, tmp_path: Path
) -> None:
    """The same run, fed from the coordinator: then every window is on the wire."""
    wire = Wire()
    data = DataConfig(recordings.train)
    steps = TrainConfig(steps=2, batch_size=64, microbatches=2)
    devices = [SimDevice(name) for name in DEVICES]
    train(run_config(recordings, data, steps), tmp_path / "run", devices, wire=wire)
    payloads = [sent.payload for sent in wire.messages]
    found = leaks(recordings.pieces, payloads)
    assert found > 0.9 * 2 * 64 * 6 * (100 // PIECE_FLOATS)


@pytest.mark.parametrize("offset", range(9))
def test_the_search_finds_part_of_a_row_at_any_offset(
    recordings: Recordings, offset: int
) -> None:
    with np.load(recordings.eval) as arrays:
        row = arrays["x"][17, 2]
    for first in range(60):
        part = row[first : first + 2 * PIECE_FLOATS - 1].tobytes()
        assert recordings.pieces.found_in(bytes(offset) + part + b"end")


def test_the_search_finds_nothing_in_other_numbers(recordings: Recordings) -> None:
    assert recordings.pieces.found_in(normal(100_000).tobytes()) == 0
