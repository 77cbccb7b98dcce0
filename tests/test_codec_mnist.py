"""LeNet learns as well from encoded activations and cotangents, over three seeds."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import onnx
import pytest
from lenet import lenet, write_mnist
from training import IN_ORDER, Wire, train

from edgetrain.config import DataConfig, FleetConfig, ModelConfig, RunConfig
from edgetrain.plan_config import PlanConfig
from edgetrain.sim.fleet import SimDevice
from edgetrain.train_config import TrainConfig
from edgetrain.wire.frame import Kind, parse
from edgetrain.wire.topics import Channel

SEEDS = (0, 1, 2)
CUTS = ("pool1",)
NAMES = ("one", "three")
TRAIN = TrainConfig(
    epochs=8,
    batch_size=50,
    microbatches=2,
    lr=0.05,
    weight_decay=1e-3,
    lr_schedule="cosine",
    warmup_steps=80,
)


class Result(NamedTuple):
    """Of all seeds: mean accuracy in per cent, and bytes of frames that crossed cuts."""

    accuracy: float
    cut_bytes: int


class Count(Wire):
    """Counts training's frames over cuts, and keeps none."""

    cut_bytes = 0

    def tap(self, source: str, to: str, channel: Channel, payload: bytes) -> None:
        if channel is not Channel.DATA or source not in NAMES or to not in NAMES:
            return
        address = parse(payload, max_body_bytes=2 << 20).address
        crosses = address.kind in (Kind.ACTIVATION, Kind.COTANGENT)
        if crosses and not address.evaluation:
            self.cut_bytes += len(payload)


def learn(folder: Path, codec: str) -> Result:
    """Train three times; the seed is that of the weights, the order and the rounding."""
    data, accuracies, total = write_mnist(folder), [], 0
    for seed in SEEDS:
        model = folder / f"{seed}.onnx"
        onnx.save(lenet(seed), model)
        config = RunConfig(
            ModelConfig(model),
            DataConfig(*data),
            msgspec.structs.replace(TRAIN, seed=seed),
            PlanConfig(cuts=CUTS, pin=IN_ORDER, codec=codec),
            FleetConfig(devices=NAMES),
        )
        wire = Count()
        devices = [SimDevice(name) for name in NAMES]
        outcome = train(config, folder / f"{codec}-{seed}", devices, wire=wire)
        assert outcome.score is not None
        accuracies.append(100 * outcome.score.accuracy)
        total += wire.cut_bytes
    print(f"{codec}: {accuracies}, {total} B")  # noqa: T201 - shown with pytest -s
    return Result(sum(accuracies) / len(accuracies), total)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return learn(tmp_path_factory.mktemp("plain"), "raw")


@pytest.mark.timeout(900)  # runs of LeNet, beside other tests
@pytest.mark.parametrize(
    ("codec", "points", "share"),
    [("int8", 0.5, 0.27), ("topk:0.1", 1.0, 0.15)],
)
def test_accuracy_stays(tmp_path, plain, codec, points, share):
    found = learn(tmp_path, codec)
    assert found.cut_bytes <= share * plain.cut_bytes
    assert found.accuracy >= plain.accuracy - points
