"""Signal to noise of estimated gradients, and the warning where there is none."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import onnx
import pytest
from training import metrics, train

from coordinator.noise_watch import PATIENCE, NoiseWatch
from coordinator.progress import SilentProgress
from coordinator.recorder import Recorder
from coordinator.run_folder import RunFolder
from coordinator.tally import StepTotal, Tally
from edgetrain.config import parse
from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.manifest import Manifest, Mode
from edgetrain.plan import Plan, StagePlan
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.signal import DECAY, Signal
from edgetrain.runtime.stage import Stage
from edgetrain.sim.fleet import SimDevice
from tests.cut_models import MODELS
from tests.stage_runs import ENGINE, OPTIMIZER, compiled, finder


def manifest(mode: Mode = Mode.HYBRID) -> Manifest:
    cuts = [finder("deep").named(name) for name in ("t1", "t3")]
    modes = [Mode.VJP, mode, Mode.VJP]
    return compiled("deep", cuts, modes=modes, estimator=EstimatorSpec(1))[1].manifest


def drawn(size: int, share: float, count: int, seed: int = 0) -> list[np.ndarray]:
    """Vectors with this share of their expected square in common."""
    rng = np.random.default_rng(seed)
    common = np.sqrt(share) * rng.standard_normal(size)
    own = np.sqrt(1 - share) * rng.standard_normal((count, size))
    return [(common + part).astype(np.float32) for part in own]


def closed(signal: Signal, vectors: list[np.ndarray]) -> float:
    for vector in vectors:
        signal.add(vector)
    signal.close(np.sum(vectors, axis=0))
    return signal.mean


def estimated(found: Manifest) -> np.ndarray:
    """Where the weights lie whose gradient is estimated: those of the first layer."""
    mask = np.zeros(found.trainable_elements, np.bool_)
    for spec in found.weights:
        if spec.name in ("w2", "b2"):
            mask[spec.offset : spec.offset + spec.elements] = True
    return mask


def test_it_is_the_mean_over_pairs():
    found = manifest()
    vectors = drawn(found.trainable_elements, 0.3, 4)
    parts = [vector[estimated(found)].astype(np.float64) for vector in vectors]
    products = [a @ b for i, a in enumerate(parts) for b in parts[:i]]
    squares = [part @ part for part in parts]
    expected = np.mean(products) / np.mean(squares)
    assert closed(Signal(found), vectors) == pytest.approx(expected, rel=1e-4)


def test_it_is_the_share_in_common_on_average():
    found = manifest()
    for share in (0.0, 0.2, 1.0):
        signals = [
            closed(Signal(found), drawn(found.trainable_elements, share, 4, seed))
            for seed in range(200)
        ]
        assert np.mean(signals) == pytest.approx(share, abs=0.03)


def test_it_runs_over_the_steps():
    found = manifest()
    signal = Signal(found)
    size = found.trainable_elements
    same = [np.ones(size, np.float32)] * 3
    assert closed(signal, same) == pytest.approx(1)
    opposite = [np.ones(size, np.float32), -np.ones(size, np.float32)]
    assert closed(signal, opposite) == pytest.approx(DECAY - (1 - DECAY))


@pytest.mark.parametrize("mode", [Mode.VJP, Mode.FROZEN])
def test_exact_gradients_have_none(mode):
    found = manifest(mode)
    assert closed(Signal(found), drawn(found.trainable_elements, 0.5, 4)) == 0


def test_one_microbatch_tells_nothing():
    found = manifest()
    assert closed(Signal(found), drawn(found.trainable_elements, 0.5, 1)) == 0


def test_warming_up_leaves_no_trace():
    cuts = [finder("deep").named(name) for name in ("t1", "t3")]
    modes = [Mode.VJP, Mode.HYBRID, Mode.VJP]
    spec = EstimatorSpec(1, control_variate=False)
    bundle = compiled("deep", cuts, modes=modes, estimator=spec)[1]
    found = []
    for warm in (False, True):
        stage = Stage(bundle, ENGINE, OPTIMIZER, microbatches=2, seed=0)
        if warm:
            stage.warm_up()
        (received,), (sent,) = stage.manifest.receives, stage.manifest.sends
        for microbatch in range(2):
            rng = np.random.default_rng(microbatch)
            values = rng.standard_normal(received.shape).astype(np.float32)
            tick = Tick(0, microbatch)
            stage.forward(tick, {received.name: values})
            stage.backward(tick, {sent.name: np.ones(sent.shape, np.float32)})
        stage.update(0)
        found.append(stage.signal.mean)
    assert found[0] == found[1] != 0


@pytest.fixture
def task(tmp_path):
    """Six layers, the first four on device one, and labels of a random teacher."""
    onnx.save(MODELS["deep"](), tmp_path / "m.onnx")
    x = np.random.default_rng(0).standard_normal((192, 6)).astype(np.float32)
    labels = (x @ np.random.default_rng(1).standard_normal((6, 5))).argmax(axis=1)
    np.savez(tmp_path / "train.npz", x=x, labels=labels)

    def run(out: str, gradient: tuple[str, str], **estimator: object):
        table = {
            "model": {"path": "m.onnx"},
            "data": {"train": "train.npz"},
            "train": {"epochs": 4, "batch_size": 32, "lr": 1e-4, "gradient": gradient},
            "plan": {"cuts": ["t3"], "pin": {"first": "one", "last": "two"}},
            "fleet": {"devices": ["one", "two"]},
            "estimator": estimator,
        }
        config = parse(table, folder=tmp_path)
        return train(config, tmp_path / out, [SimDevice("one"), SimDevice("two")])

    return run


def test_a_run_records_it(task):
    outcome = task("run", ("hybrid", "vjp"))
    lines = metrics(outcome.folder)
    assert len(lines) == 24
    assert all(len(line["signal_to_noise"]) == 2 for line in lines)
    assert all(line["signal_to_noise"][1] == 0 for line in lines)
    last = lines[-1]["signal_to_noise"][0]
    assert last != 0
    assert outcome.rows[0].signal_to_noise == pytest.approx(last, abs=1e-6)
    assert "Signal to noise" in (outcome.folder / "report.html").read_text()


def test_more_tangents_give_more_signal(task):
    one, many = (
        task(f"run{k}", ("hybrid", "vjp"), tangents=k, control_variate=False).rows[0]
        for k in (1, 16)
    )
    assert many.signal_to_noise > 2 * abs(one.signal_to_noise)


def test_an_exact_run_does_not_mention_it(task):
    outcome = task("run", ("vjp", "vjp"))
    assert not any("signal_to_noise" in line for line in metrics(outcome.folder))
    assert "Signal to noise" not in (outcome.folder / "report.html").read_text()


def test_noise_alone_is_said_once_and_with_a_way_out(tmp_path):
    stages = tuple(
        StagePlan(n, name, (), "hybrid", "", 1, 1, 0.1, 0.1, 1)
        for n, name in enumerate(("one", "two"))
    )
    with closing(RunFolder(tmp_path)) as folder:
        recorder = Recorder(folder, SilentProgress(), lambda: 0.0)
        recorder.begin(Plan("", "1f1b", 1, 1, stages, 1.0, ""), 200, 200)
        for step in range(200):
            total = StepTotal(step, 2.3, 32, 100, (0.3, 0.0012))
            recorder.stepped(total, Tally(2))
    (remark,) = recorder.remarks
    assert remark.startswith("stage 1 (hybrid on two) learns from noise: its gradients'")
    assert "0.0012 at step 51 and the loss does not fall; train fewer" in remark


def watched(signal: float, losses: list[float]) -> list[int]:
    """The steps at which stage 1 was found hopeless."""
    watch = NoiseWatch(2)
    return [
        step
        for step, loss in enumerate(losses)
        if watch.hopeless(loss, (0.0, signal)) == [1]
    ]


def test_a_hopeless_stage_is_found_after_so_many_steps_and_once():
    assert watched(0.001, [1.0] * 500) == [PATIENCE]
    assert watched(-0.001, [1.0] * 500) == [PATIENCE]


def test_a_loss_that_falls_is_hope():
    assert not watched(0.001, [0.99**step for step in range(500)])


def test_a_signal_is_hope_and_no_noise_no_matter():
    assert not watched(0.01, [1.0] * 500)
    assert not watched(0.0, [1.0] * 500)


def test_a_loss_that_stops_falling_is_found_later():
    falling = [0.99**step for step in range(200)]
    (found,) = watched(0.001, falling + [falling[-1]] * 300)
    assert 200 < found < 400
