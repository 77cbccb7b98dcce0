"""A plan survives its file, and a damaged file is refused in words."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import PlanError
from edgetrain.plan import Plan, StagePlan

COUNTS = st.integers(0, 2**62)
SECONDS = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
STAGES = st.builds(
    StagePlan,
    stage=st.just(0),
    device=st.text(),
    cut=st.lists(st.text(), max_size=3).map(tuple),
    mode=st.sampled_from(["vjp", "hybrid", "frozen"]),
    reason=st.text(),
    layers=COUNTS,
    parameters=COUNTS,
    predicted_forward_s=SECONDS,
    predicted_backward_s=SECONDS,
    predicted_memory_bytes=COUNTS,
)


@st.composite
def plans(draw):
    stages = draw(st.lists(STAGES, min_size=1, max_size=3))
    numbered = tuple(msgspec.structs.replace(s, stage=n) for n, s in enumerate(stages))
    return Plan(
        model_sha256=draw(st.text("0123456789abcdef", max_size=64)),
        schedule=draw(st.text()),
        microbatches=draw(COUNTS),
        microbatch=draw(COUNTS),
        stages=numbered,
        predicted_step_s=draw(SECONDS),
        reason=draw(st.text()),
    )


def example() -> Plan:
    stage = StagePlan(0, "pi", ("x",), "vjp", "it runs backward", 3, 100, 0.1, 0.2, 1000)
    last = StagePlan(1, "nano", (), "vjp", "it runs backward", 2, 50, 0.1, 0.2, 900)
    return Plan("ab", "1f1b", 4, 8, (stage, last), 1.5, "two devices answered")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans())
def test_round_trip(plan):
    assert Plan.decode(plan.encode()) == plan


def test_the_file_is_made_to_be_read():
    lines = example().encode().decode().splitlines()
    assert len(lines) > 20
    assert '  "schedule": "1f1b",' in lines


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"microbatches": "four"}, r"microbatches"),
        ({"stages": []}, r"numbered \[\]"),
        ({"predicted_step_s": None}, r"predicted_step_s"),
    ],
)
def test_bad_fields_are_named(change, words):
    data = json.dumps(json.loads(example().encode()) | change).encode()
    with pytest.raises(PlanError, match=words):
        Plan.decode(data)


def test_stages_are_in_order():
    fields = json.loads(example().encode())
    fields["stages"].reverse()
    with pytest.raises(PlanError, match=r"numbered \[1, 0\]"):
        Plan.decode(json.dumps(fields).encode())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_plan_or_a_plan_error(data):
    with pytest.raises(PlanError, match="not a plan"):
        Plan.decode(data)


def test_a_truncated_file_is_refused():
    data = example().encode()
    for length in range(len(data) - 1):
        with pytest.raises(PlanError):
            Plan.decode(data[:length])
