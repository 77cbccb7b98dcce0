from __future__ import annotations

import io
import re

import pytest

from coordinator.figures import (
    DeviceFigures,
    DeviceRow,
    Snapshot,
    bytes_text,
    count_text,
    seconds_text,
)
from coordinator.progress import (
    PlainProgress,
    SilentProgress,
    TerminalProgress,
    open_progress,
)

ROWS = [
    DeviceRow("pc", 1, "vjp", 33_000, 0.5, 12_300_000, 0.01, 0.012),
    DeviceRow("[pi]", 0, "hybrid", 160, 0.93, 45_600),
]


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def snapshot(step, *, accuracy=None):
    devices = (DeviceFigures("[pi]", 0.93), DeviceFigures("pc", 0.4))
    return Snapshot(step, 40, 1, 0.12345, accuracy, 512.0, 1.25e6, devices)


@pytest.fixture(autouse=True)
def known_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_pipe_gets_a_line_every_few_seconds_and_the_last_step():
    stream, clock = io.StringIO(), Clock()
    progress = open_progress(stream, clock)
    assert isinstance(progress, PlainProgress)
    for step in range(1, 41):
        clock.now_s = step / 4
        progress.update(snapshot(step))
    progress.close()
    shown = re.findall(r"^step (\d+)/40", stream.getvalue(), re.MULTILINE)
    assert shown == ["1", "21", "40"]
    assert "\x1b" not in stream.getvalue()


def test_a_plain_line_carries_all_figures():
    stream = io.StringIO()
    open_progress(stream, Clock()).update(snapshot(40, accuracy=0.971))
    assert stream.getvalue() == (
        "step 40/40  epoch 2  loss 0.1235  accuracy 0.9710  512 samples/s  1.25 MB/s"
        "  busy: [pi] 93%, pc 40%\n"
    )


def test_a_terminal_shows_bars_and_each_device():
    stream = Terminal()
    progress = open_progress(stream, Clock())
    assert isinstance(progress, TerminalProgress)
    progress.update(snapshot(1))
    progress.say("device [pi] joined")
    progress.update(snapshot(40, accuracy=0.971))
    progress.close()
    progress.close()
    text = plain(stream.getvalue())
    for word in ("step 1/40", "step 40/40", "accuracy 0.9710", "1.25 MB/s", "busy 93%"):
        assert word in text
    assert "device [pi] joined" in text
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1


def test_a_terminal_that_never_stepped_is_left_as_it_was():
    stream = Terminal()
    open_progress(stream, Clock()).close()
    assert stream.getvalue() == ""


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_progress(Terminal(), Clock()), PlainProgress)


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_the_closing_table_has_a_row_for_each_stage_in_order(stream):
    progress = open_progress(stream, Clock())
    progress.closing_table(ROWS)
    lines = [line for line in plain(stream.getvalue()).splitlines() if line.strip()]
    assert re.split(r"\s{2,}", lines[0].strip())[:4] == [
        "device",
        "stage",
        "gradient",
        "weights",
    ]
    first, second = lines[2:4]
    assert first.split()[:4] == ["[pi]", "0", "hybrid", "160"]
    assert second.split()[:4] == ["pc", "1", "vjp", "33.0k"]
    assert "12.0 ms (10.0 ms)" in second


def test_the_closing_table_fits_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    open_progress(stream, Clock()).closing_table(ROWS)
    assert "(10.0 ms)" in plain(stream.getvalue())
    assert "…" not in stream.getvalue()


def test_silence_writes_nothing():
    stream = io.StringIO()
    progress = open_progress(stream, Clock(), silent=True)
    assert isinstance(progress, SilentProgress)
    progress.update(snapshot(40))
    progress.say("hello")
    progress.closing_table(ROWS)
    progress.close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (7, "7"), (999, "999"), (999.6, "1.00k"), (12_345, "12.3k"), (1e6, "1.00M")],
)
def test_counts_are_written_in_three_digits(count, text):
    assert count_text(count) == text


def test_bytes_and_seconds_carry_their_units():
    assert bytes_text(1_234_567) == "1.23 MB"
    assert bytes_text(12) == "12 B"
    assert bytes_text(None) == seconds_text(None) == "-"
    assert seconds_text(0.0123) == "12.3 ms"
    assert seconds_text(12.34) == "12.3 s"
