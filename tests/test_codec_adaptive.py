"""The adaptive codec holds a step's time when the bandwidth changes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.wire.codec_adaptive import LADDER, AdaptiveRate

BYTES = {"raw": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
TARGET_S = 1.0


def drive(rates: list[float], compute_s: float = 0.2) -> tuple[list[str], list[float]]:
    """Steps over a link of so many bytes a second each."""
    rate, codecs, times = AdaptiveRate(TARGET_S), [], []
    for bytes_per_s in rates:
        codecs.append(rate.codec.name)
        times.append(max(compute_s, BYTES[codecs[-1]] / bytes_per_s))
        rate.observe(times[-1])
    return codecs, times


def test_a_fast_link_stays_plain():
    codecs, _ = drive([10.0] * 50)
    assert set(codecs) == {"raw"}


def test_it_goes_down_as_far_as_it_must_and_comes_back():
    codecs, times = drive([10.0] * 10 + [1.2] * 100 + [10.0] * 200)
    assert codecs[9] == "raw"
    assert codecs[20] == "int8"
    assert codecs[-1] == "raw"
    late = sum(time > TARGET_S * 1.05 for time in times[14:110])
    assert late <= 8  # tries at a longer codec, each twice as long after the one before


def test_tries_become_rare():
    _, times = drive([1.2] * 2000)
    late = [step for step, time in enumerate(times) if time > TARGET_S * 1.05]
    gaps = [b - a for a, b in zip(late[::2], late[2::2], strict=False)]
    assert gaps[-1] >= 512
    assert len(late) < 40


def test_one_hiccup_is_not_heeded():
    codecs, _ = drive([10.0] * 5 + [0.1] + [10.0] * 5)
    assert set(codecs) == {"raw"}


def test_it_ends_at_the_shortest():
    codecs, _ = drive([0.01] * 20)
    assert codecs[-1] == LADDER[-1].name


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(0.001, 100.0), max_size=80))
def test_it_hangs_on_nothing_but_what_it_is_told(seconds):
    one, two = AdaptiveRate(TARGET_S), AdaptiveRate(TARGET_S)
    for step_s in seconds:
        before = LADDER.index(one.codec)
        one.observe(step_s)
        two.observe(step_s)
        assert one.codec == two.codec
        assert abs(LADDER.index(one.codec) - before) <= 1
