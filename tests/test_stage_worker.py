"""A worker keeps its schedule, whatever arrives, and stays obedient while it waits."""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
import pytest

from edgetrain.errors import DataError
from edgetrain.manifest import Mode
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.parameters import COMMITS_KEPT, RUN_AHEAD
from edgetrain.stage_state import StageState
from edgetrain.wire.frame import Address, Kind
from edgetrain.wire.messages import (
    Evaluate,
    Evaluated,
    Failed,
    Fetch,
    GradientNorm,
    NormTotal,
    Release,
    StepDone,
    Train,
)
from edgetrain.wire.topics import COORDINATOR
from tests.cut_models import samples
from tests.stage_runs import Pass, compiled, evaluate, finder, stages_of, train_pass
from tests.worker_bench import EPOCH, RUN, Bench, letter

CUTS = ("t1", "t3")
IDS = (RUN, EPOCH)


def bundle(stage: int, *, trainable: str = "all", mode: Mode = Mode.VJP):
    cuts = [finder("deep").named(name) for name in CUTS]
    modes = [mode if number == stage else Mode.VJP for number in range(3)]
    return compiled("deep", cuts, trainable=trainable, modes=modes)[stage]


@cache
def reference(seed: int = 0) -> Pass:
    """One microbatch of the whole pipeline, without messages."""
    stages = stages_of(compiled("deep", [finder("deep").named(name) for name in CUTS]))
    return train_pass(stages, samples("deep", seed))


def sent(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """An activation that crosses a cut."""
    return {name: reference(seed).crossing[name]}


def cotangent(seed: int = 0) -> dict[str, np.ndarray]:
    return reference(seed).cotangents[2]


def labels(seed: int = 0) -> dict[str, np.ndarray]:
    return {"labels": samples("deep", seed)["labels"]}


def test_a_middle_stage_runs_its_schedule():
    done = reference()
    with Bench(bundle(1)) as bench:
        bench.worker.give(Train(*IDS, 0))
        bench.send(Kind.ACTIVATION, sent("t1"))
        message = bench.letter("last")
        assert message.address.stage == 2
        assert np.array_equal(message.array((4, 8)), done.crossing["t3"])
        bench.send(Kind.COTANGENT, cotangent())
        message = bench.letter("first")
        assert message.address.kind is Kind.COTANGENT
        assert np.array_equal(message.array((4, 6)), done.cotangents[1]["t1"])
        report = bench.report()
        assert isinstance(report, StepDone)
        assert (report.run, report.epoch, report.stage, report.step) == (*IDS, 1, 0)
        assert (report.loss_sum, report.samples) == (0, 0)
        assert report.sent_bytes == bench.frame_bytes
        assert report.stash_peak_bytes == done.stash_bytes[1]
        assert report.compute_s == 3, "forward, backward and update, a tick each"
        assert report.seconds > report.compute_s


def test_the_last_stage_reports_its_losses():
    """Sums over the step's samples, and the peak of one microbatch in flight."""
    with Bench(bundle(2), microbatches=2) as bench:
        bench.worker.give(Train(*IDS, 1))
        total = 0.0
        for step in range(2):
            for m in range(2):
                done = reference(m)
                bench.send(Kind.ACTIVATION, sent("t3", m), step, m)
                bench.send(Kind.LABELS, labels(m), step, m)
                total += 0 if step else float(done.losses.sum(dtype=np.float64))
        first, second = bench.report(), bench.report()
        assert first.loss_sum == pytest.approx(total, rel=1e-6)
        assert first.samples == second.samples == 8
        assert first.stash_peak_bytes == done.stash_bytes[2]
        assert second.loss_sum < first.loss_sum
        for _ in range(4):
            bench.letter("middle")
        assert first.sent_bytes + second.sent_bytes == bench.frame_bytes


def test_duplicates_change_nothing():
    done = reference()
    with Bench(bundle(1)) as bench:
        bench.worker.give(Train(*IDS, 0))
        bench.send(Kind.ACTIVATION, sent("t1"))
        bench.send(Kind.ACTIVATION, {"t1": np.zeros((4, 6), np.float32)})
        bench.send(Kind.COTANGENT, cotangent())
        bench.send(Kind.COTANGENT, {"t3": np.zeros((4, 8), np.float32)})
        found = bench.letter("last").array((4, 8))
        assert np.array_equal(found, done.crossing["t3"])
        found = bench.letter("first").array((4, 6))
        assert np.array_equal(found, done.cotangents[1]["t1"])
        bench.report()
        assert all(mail.empty() for mail in bench.mail.values())


def test_early_tensors_wait_and_late_ones_are_dropped():
    """Steps 1 and 0 arrive in the wrong order; step 0 comes again when it is over."""
    with Bench(bundle(1), optimizer=OptimizerSpec("sgd", LRSpec(0.0))) as bench:
        for step in (1, 0):
            bench.send(Kind.COTANGENT, cotangent(seed=step), step)
            bench.send(Kind.ACTIVATION, sent("t1", step), step)
        bench.worker.give(Train(*IDS, 0))
        assert bench.report().step == 0
        first = bench.letter("last")
        assert np.array_equal(first.array((4, 8)), reference().crossing["t3"])
        bench.send(Kind.ACTIVATION, sent("t1", 5), 0)
        bench.worker.give(Train(*IDS, 1))
        assert bench.report().step == 1
        second = bench.letter("last")
        assert second.address.step == 1
        assert np.array_equal(second.array((4, 8)), reference(1).crossing["t3"])
        assert [bench.letter("first").address.step for _ in range(2)] == [0, 1]


@pytest.mark.parametrize(
    ("kind", "array", "tensor", "words"),
    [
        (Kind.ACTIVATION, np.zeros((4, 6)), 0, "float64, not float32"),
        (Kind.ACTIVATION, np.zeros((4, 7), np.float32), 0, "are no float32[4, 6]"),
        (Kind.ACTIVATION, np.zeros((4, 6), np.float32), 1, "takes no such tensor"),
        (Kind.LABELS, np.zeros(4, np.int64), 0, "takes no such tensor"),
        (Kind.WEIGHTS, np.zeros(4, np.float32), 0, "takes no such tensor"),
    ],
)
def test_what_does_not_fit_is_dropped_with_a_warning(kind, array, tensor, words, caplog):
    done = reference()
    with caplog.at_level(logging.WARNING), Bench(bundle(1)) as bench:
        bench.worker.give(Train(*IDS, 0))
        address = Address(kind, *IDS, 1, tensor=tensor)
        bench.worker.give(letter(address, array))
        bench.send(Kind.ACTIVATION, sent("t1"))
        found = bench.letter("last").array((4, 8))
        assert np.array_equal(found, done.crossing["t3"])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "stage 1: tensor dropped" in record.getMessage()
    assert words in record.getMessage()


@pytest.mark.parametrize("given", [0, 1, 2])
def test_release_ends_a_worker_wherever_it_waits(given):
    """Before the step, for its activation, or for its cotangent."""
    with Bench(bundle(1)) as bench:
        if given > 0:
            bench.worker.give(Train(*IDS, 0))
        if given > 1:
            bench.send(Kind.ACTIVATION, sent("t1"))
            bench.letter("last")
        bench.worker.give(Release(*IDS, "enough"))
        bench.thread.join(20)
        assert not bench.thread.is_alive()
        assert bench.reports.empty()


def test_weights_are_handed_out_in_the_middle_of_a_step():
    """And they are those of a commit, never half of an update."""
    made = bundle(1)
    with Bench(made) as bench:
        bench.worker.give(Train(*IDS, 1))
        bench.send(Kind.ACTIVATION, sent("t1"))
        bench.letter("last")
        bench.worker.give(Fetch(*IDS, -1))
        message = bench.letter(COORDINATOR)
        assert (message.address.kind, message.address.step) == (Kind.WEIGHTS, 0)
        elements = made.manifest.elements
        assert np.array_equal(message.array((elements,)), made.weights)
        bench.send(Kind.COTANGENT, cotangent())
        bench.report()
        for step in (0, -1):
            bench.worker.give(Fetch(*IDS, step))
            message = bench.letter(COORDINATOR)
            assert message.address.step == step + 1
            same = np.array_equal(message.array((elements,)), made.weights)
            assert same == (step == -1)


def test_a_diverged_stage_says_so_and_still_serves_its_weights():
    made = bundle(2)
    with Bench(made) as bench:
        bench.worker.give(Train(*IDS, 5))
        bad = np.full((4, 8), np.nan, np.float32)
        bench.send(Kind.ACTIVATION, {"t3": bad})
        bench.send(Kind.LABELS, labels())
        report = bench.report()
        assert isinstance(report, Failed)
        assert report.diverged
        assert (report.stage, report.step) == (2, 0)
        bench.send(Kind.ACTIVATION, {"t3": np.zeros((4, 8), np.float32)}, 1)
        bench.send(Kind.LABELS, labels(), 1)
        bench.worker.give(Fetch(*IDS, -1))
        found = bench.letter(COORDINATOR).array((made.manifest.elements,))
        assert np.array_equal(found, made.weights)
        assert bench.reports.empty()


class Faulty:
    """A source whose samples cannot be had."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def training(self, _tick: Tick):
        raise self._error

    def evaluation(self, _microbatch: int):
        raise self._error


@pytest.mark.parametrize(
    ("error", "words"),
    [(DataError("the card is gone"), "the card is gone"), (KeyError("x"), "a defect")],
)
def test_whatever_fails_is_reported(error, words, caplog):
    """A thread that dies in silence would leave the coordinator waiting."""
    made = bundle(0)
    with caplog.at_level(logging.CRITICAL), Bench(made, source=Faulty(error)) as bench:
        bench.worker.give(Train(*IDS, 0))
        report = bench.report()
        assert isinstance(report, Failed)
        assert not report.diverged
        assert words in report.reason
        bench.worker.give(Fetch(*IDS, -1))
        found = bench.letter(COORDINATOR).array((made.manifest.elements,))
        assert np.array_equal(found, made.weights)


def test_weights_that_are_no_longer_kept_are_refused():
    with Bench(bundle(1)) as bench:
        bench.worker.give(Fetch(*IDS, 7))
        report = bench.report()
        assert isinstance(report, Failed)
        assert "after step 7 are no longer kept" in report.reason


@pytest.mark.parametrize("total", [0.01, 1e4])
def test_the_gradient_is_clipped_by_the_whole_models_norm(total):
    """w - lr g min(1, clip / norm), with the norm that the coordinator tells."""
    made = bundle(1)
    clipping = OptimizerSpec("sgd", LRSpec(0.5), clip_norm=2.0)
    with Bench(made, optimizer=clipping, microbatches=2) as bench:
        bench.worker.give(Train(*IDS, 0))
        for m in range(2):
            bench.send(Kind.ACTIVATION, sent("t1", m), 0, m)
            bench.send(Kind.COTANGENT, cotangent(m), 0, m)
        report = bench.report()
        assert isinstance(report, GradientNorm)
        parts = [reference(m).gradients for m in range(2)]
        mean = {n: (parts[0][n] + parts[1][n]) / 2 for n in ("w2", "b2", "w3", "b3")}
        own = sum(float(np.square(g, dtype=np.float64).sum()) for g in mean.values())
        assert report.square_sum == pytest.approx(own, rel=1e-5)
        bench.worker.give(NormTotal(*IDS, 0, total))
        assert isinstance(bench.report(), StepDone)
        factor = min(1.0, 2.0 / (np.sqrt(total) + 1e-6))
        for spec in made.manifest.weights:
            part = slice(spec.offset, spec.offset + spec.elements)
            step = 0.5 * factor * mean[spec.name].ravel()
            found = bench.stage.parameters.weights[part]
            np.testing.assert_allclose(found, made.weights[part] - step, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 4, 5, 8])
def test_an_evaluation_counts_its_samples_and_not_the_padding(rows):
    """Two microbatches of four at most; `rows` of them are samples."""
    with Bench(bundle(2)) as bench:
        microbatches = -(-rows // 4)
        bench.worker.give(Evaluate(*IDS, 1, 0, microbatches, rows))
        loss, hits = [], []
        for m in range(microbatches):
            feeds = samples("deep", m)
            outputs = evaluate(compiled("deep"), feeds)
            loss += outputs["loss"].tolist()
            hits += (outputs["y"].argmax(axis=1) == feeds["labels"]).tolist()
            bench.send(Kind.ACTIVATION, sent("t3", m), 1, m, evaluation=True)
            bench.send(Kind.LABELS, labels(m), 1, m, evaluation=True)
        report = bench.report()
        assert isinstance(report, Evaluated)
        assert (report.block, report.samples) == (1, rows)
        assert report.loss_sum == pytest.approx(sum(loss[:rows]), rel=1e-5)
        assert report.correct == sum(hits[:rows])


def test_an_evaluation_between_two_steps_does_not_count_as_work():
    with Bench(bundle(1)) as bench:
        bench.worker.give(Train(*IDS, 0))
        bench.send(Kind.ACTIVATION, sent("t1"))
        bench.send(Kind.COTANGENT, cotangent())
        first = bench.report()
        bench.worker.give(Evaluate(*IDS, 1, 0, 1, 4))
        bench.send(Kind.ACTIVATION, sent("t1"), 1, evaluation=True)
        letters = [bench.letter("last") for _ in range(2)]
        assert [message.address.evaluation for message in letters] == [False, True]
        bench.send(Kind.ACTIVATION, sent("t1"), 1)
        bench.send(Kind.COTANGENT, cotangent(), 1)
        bench.worker.give(Train(*IDS, 1))
        second = bench.report()
        assert second.sent_bytes == first.sent_bytes
        assert second.compute_s == first.compute_s


class Rows:
    """Samples that stay on the first device."""

    def training(self, tick: Tick):
        feeds = samples("deep", tick.microbatch)
        return {"x": feeds["x"]}, feeds["labels"]

    def evaluation(self, microbatch: int):
        return self.training(Tick(0, microbatch))


def test_labels_go_from_the_data_straight_to_the_last_stage():
    with Bench(bundle(0), source=Rows()) as bench:
        bench.worker.give(Train(*IDS, 0))
        message = bench.letter("last")
        assert message.address.kind is Kind.LABELS
        assert message.address.stage == 2
        assert np.array_equal(message.array((4,)), samples("deep")["labels"])


def test_a_stage_that_nothing_holds_back_keeps_more_commits():
    """It may be past the failed step; the weights before that must still be there."""
    made = bundle(0, trainable="last:1")
    assert made.manifest.cotangents_in == ()
    with Bench(made, source=Rows()) as bench:
        failed = 5
        bench.worker.give(Train(*IDS, failed - 1 + RUN_AHEAD))
        done = [bench.report().step for _ in range(failed + RUN_AHEAD)]
        assert done[-1] == failed - 1 + RUN_AHEAD
        bench.worker.give(Fetch(*IDS, failed - COMMITS_KEPT))
        message = bench.letter(COORDINATOR)
        assert message.address.step == failed - COMMITS_KEPT + 1


def test_the_state_is_handed_over_between_steps_and_gone_on_from():
    with Bench(bundle(1)) as bench:
        bench.worker.give(Train(*IDS, 0))
        bench.send(Kind.ACTIVATION, sent("t1"))
        bench.send(Kind.COTANGENT, cotangent())
        assert isinstance(bench.report(), StepDone)
        bench.worker.give(Fetch(*IDS, 0, state=True))
        message = bench.letter(COORDINATOR)
        assert (message.address.kind, message.address.step) == (Kind.STATE, 1)
        state = StageState.decode(message.body, bundle(1).manifest)
    with Bench(bundle(1).resumed(state)) as bench:
        bench.worker.give(Train(*IDS, 1))
        bench.send(Kind.ACTIVATION, sent("t1"), 1)
        bench.send(Kind.COTANGENT, cotangent(), 1)
        report = bench.report()
        assert isinstance(report, StepDone)
        assert report.step == 1
        bench.worker.give(Fetch(*IDS, 0))
        message = bench.letter(COORDINATOR)
        assert message.address.kind is Kind.WEIGHTS
        assert np.array_equal(message.array((state.weights.size,)), state.weights)


def test_a_state_that_is_past_is_not_handed_over():
    with Bench(bundle(1)) as bench:
        bench.worker.give(Fetch(*IDS, 3, state=True))
        report = bench.report()
        assert isinstance(report, Failed)
        assert "not the present one" in report.reason


def test_a_stage_that_joins_late_takes_tensors_that_come_before_leave_to_train():
    state = StageState(100, bundle(1).weights, {})
    with Bench(bundle(1).resumed(state)) as bench:
        bench.send(Kind.ACTIVATION, sent("t1"), 100)
        bench.send(Kind.COTANGENT, cotangent(), 100)
        bench.worker.give(Train(*IDS, 100))
        report = bench.report()
        assert isinstance(report, StepDone)
        assert report.step == 100


def test_a_command_that_comes_again_brings_the_last_reports_again():
    """Its first report may have been lost with a broker."""
    with Bench(bundle(1)) as bench:
        bench.worker.give(Train(*IDS, 0))
        bench.send(Kind.ACTIVATION, sent("t1"))
        bench.send(Kind.COTANGENT, cotangent())
        report = bench.report()
        assert isinstance(report, StepDone)
        bench.worker.give(Train(*IDS, 0))
        assert bench.report() == report
