"""Every schedule, on every small pipeline: it ends, and keeps what it promises."""

from __future__ import annotations

import collections
import itertools

import pytest

from edgetrain import train_config
from edgetrain.errors import PlanError
from edgetrain.schedules.actions import Action, Op, lower, text
from edgetrain.schedules.table import SCHEDULES
from edgetrain.schedules.validate import Times, simulate

STAGES = range(1, 9)
MICROBATCHES = range(1, 17)
PIPELINES = list(itertools.product(STAGES, MICROBATCHES))
TRAINING = [name for name, schedule in SCHEDULES.items() if schedule.updates]


def balanced(stages, hop_s=0.0):
    return Times.balanced(stages, forward_s=1.0, backward_s=2.0, hop_s=hop_s)


def run_on_mailboxes(name, stages, microbatches):
    """An independent interpreter: the order in which actions ran, and each stash's peak."""
    queues = [
        collections.deque(lower(SCHEDULES[name](s, stages, microbatches), stages))
        for s in range(stages)
    ]
    mail = collections.Counter((0, Op.RECV_ACTIVATION, m) for m in range(microbatches))
    ran = []
    while any(queues):
        before = len(ran)
        for s, queue in enumerate(queues):
            if not queue:
                continue
            action = queue[0]
            if action.op in (Op.RECV_ACTIVATION, Op.RECV_COTANGENT):
                slot = (s, action.op, action.microbatch)
                if not mail[slot]:
                    continue
                mail[slot] -= 1
            elif action.op is Op.SEND_ACTIVATION:
                mail[s + 1, Op.RECV_ACTIVATION, action.microbatch] += 1
            elif action.op is Op.SEND_COTANGENT:
                mail[s - 1, Op.RECV_COTANGENT, action.microbatch] += 1
            ran.append(queue.popleft())
        assert len(ran) > before, "deadlock"
    assert not +mail, "tensors that nobody took"
    return ran


def stash_peak(ran, stage):
    held = peak = 0
    for action in ran:
        if action.stage == stage:
            held += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD)
            peak = max(peak, held)
    return peak, held


@pytest.mark.parametrize("name", TRAINING)
def test_every_pipeline_runs_to_its_end(name):
    for stages, microbatches in PIPELINES:
        ran = run_on_mailboxes(name, stages, microbatches)
        assert len(ran) == len(set(ran)), "an action ran twice"
        position = {action: n for n, action in enumerate(ran)}
        for s in range(stages):
            for m in range(microbatches):
                assert (
                    position[Action(s, Op.FORWARD, m)] < position[Action(s, Op.BACKWARD, m)]
                )
            update = position[Action(s, Op.UPDATE)]
            assert update == max(n for a, n in position.items() if a.stage == s)
            promised = SCHEDULES[name].stash_peak(s, stages, microbatches)
            assert stash_peak(ran, s) == (promised, 0)


@pytest.mark.parametrize("name", TRAINING)
def test_gradients_are_summed_in_order(name):
    for stages, microbatches in PIPELINES:
        for s in range(stages):
            for op in (Op.FORWARD, Op.BACKWARD):
                order = [
                    a.microbatch
                    for a in SCHEDULES[name](s, stages, microbatches)
                    if a.op is op
                ]
                assert order == list(range(microbatches))


def test_every_name_of_a_run_file_is_in_the_table():
    assert set(TRAINING) == set(train_config.SCHEDULES)


def test_promised_stash_peaks():
    peaks = {
        name: [schedule.stash_peak(s, 4, 8) for s in range(4)]
        for name, schedule in SCHEDULES.items()
    }
    assert peaks == {
        "gpipe": [8, 8, 8, 8],
        "1f1b": [4, 3, 2, 1],
        "1f1b-eager": [7, 5, 3, 1],
        "forward_only": [0, 0, 0, 0],
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_simulation_of_every_pipeline(name):
    for stages, microbatches in PIPELINES:
        timeline = simulate(SCHEDULES[name], microbatches, balanced(stages))
        assert timeline.stash_peak == tuple(
            SCHEDULES[name].stash_peak(s, stages, microbatches) for s in range(stages)
        )
        slots = microbatches + stages - 1
        assert timeline.bubble == pytest.approx((stages - 1) / slots)
        assert timeline.period_s == pytest.approx(
            slots * (3.0 if name in TRAINING else 1.0)
        )


@pytest.mark.parametrize("name", SCHEDULES)
def test_spans_respect_order_and_arrival(name):
    hop_s = 0.25
    timeline = simulate(SCHEDULES[name], 6, balanced(4, hop_s))
    ends = {span.action: span.end_s for spans in timeline.spans for span in spans}
    for spans in timeline.spans:
        for one, following in itertools.pairwise(spans):
            assert one.start_s <= one.end_s == following.start_s
    for action, end_s in ends.items():
        s, m = action.stage, action.microbatch
        if action.op is Op.RECV_ACTIVATION and s > 0:
            assert end_s >= ends[Action(s - 1, Op.FORWARD, m)] + hop_s
        if action.op is Op.RECV_COTANGENT:
            assert end_s >= ends[Action(s + 1, Op.BACKWARD, m)] + hop_s
    assert max(ends.values()) == timeline.period_s


@pytest.mark.parametrize(
    ("stages", "hops"),
    [(2, {"1f1b": 8, "1f1b-eager": 2, "gpipe": 2}), (4, {"1f1b": 16, "1f1b-eager": 6})],
)
def test_eager_warm_up_takes_hops_off_the_critical_path(stages, hops):
    hop_s = 1e-3
    for name, count in hops.items():
        timeline = simulate(SCHEDULES[name], 8, balanced(stages, hop_s))
        assert timeline.period_s - 3.0 * (8 + stages - 1) == pytest.approx(count * hop_s)


def test_the_slowest_stage_sets_the_pace():
    times = Times(forward_s=[1, 5, 1], backward_s=[1, 5, 1], hop_s=[0, 0])
    timeline = simulate(SCHEDULES["1f1b"], 50, times)
    assert timeline.period_s == pytest.approx(1 + 50 * 10 + 1)  # first F, last B of stage 0


GOLDEN = {
    "gpipe": ["0F0 0F1 0F2 0B0 0B1 0B2 0U", "1F0 1F1 1F2 1B0 1B1 1B2 1U"],
    "1f1b": ["0F0 0F1 0B0 0F2 0B1 0B2 0U", "1F0 1B0 1F1 1B1 1F2 1B2 1U"],
    "1f1b-eager": ["0F0 0F1 0F2 0B0 0B1 0B2 0U", "1F0 1B0 1F1 1B1 1F2 1B2 1U"],
    "forward_only": ["0F0 0F1 0F2", "1F0 1F1 1F2"],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_golden_form(name):
    assert [text(SCHEDULES[name](s, 2, 3)) for s in range(2)] == GOLDEN[name]


def test_golden_form_of_the_lowered_schedule():
    lowered = [text(lower(SCHEDULES["1f1b"](s, 3, 1), 3)) for s in range(3)]
    assert lowered == [
        "0RA0 0F0 0SA0 0RC0 0B0 0U",
        "1RA0 1F0 1SA0 1RC0 1B0 1SC0 1U",
        "2RA0 2F0 2B0 2SC0 2U",
    ]


def script(*stages):
    """A schedule written out, such as ``F0 B0 U`` for each stage."""

    def actions(stage, _stages, _microbatches):
        for word in stages[stage].split():
            yield Action(stage, Op(word[0]), int(word[1:]) if word[1:] else None)

    return actions


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (script("F0 B0 F1 B1 U", "F1 B1 F0 B0 U"), r"0RC0 1RA1 wait"),
        (script("F0 B0 U", "F0 B0 F1 B1 U"), r"1RA1 wait"),
        (script("F0 F1 B0 B1 U", "F0 B0 U"), r"0RC1 wait"),
        (script("F0 F1 B0 B1 U", "F0 F1 B0 B1 B0 U"), r"runs 1B0 without a stash"),
        (script("F0 F1", "F0"), r"never runs 1RA1"),
        (script("F0 F1 B1 U", "F0 F1 B1 U"), r"updates stage 1 before .*'0'"),
        (script("F0 F1 B1", "F0 F1 B1"), r"stage 0 ends with the stash .*'0'"),
        (script("F0 F0", "F0 F0"), r"0RA0 1RA0 wait|0RA0 wait"),
    ],
)
def test_broken_schedules_are_refused(schedule, words):
    with pytest.raises(PlanError, match=words):
        simulate(schedule, 2, balanced(2))


def test_bad_arguments_are_refused():
    with pytest.raises(PlanError, match="0 microbatches"):
        simulate(SCHEDULES["gpipe"], 0, balanced(2))
    with pytest.raises(PlanError, match="one hop fewer"):
        Times([1.0, 1.0], [1.0, 1.0], [0.0, 0.0])
