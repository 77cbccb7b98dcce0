from __future__ import annotations

import json
import math
import re
import tomllib
from contextlib import closing
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.chart import line_chart
from coordinator.figures import DeviceRow
from coordinator.report import Report, render
from coordinator.run_folder import (
    EvalMetrics,
    RunFolder,
    StepMetrics,
    read_metrics,
    resolved_toml,
    without_password,
)
from edgetrain.config import load
from edgetrain.errors import ConfigError, DataError, RunError

NOW = datetime(2031, 2, 3, 4, 5, 6)  # noqa: DTZ001 - folders are named in local time
RUN = """
[model]
path = "net.onnx"
trainable = ["a.*"]
[data]
train = "train.npz"
[train]
gradient = { pi = "hybrid" }
lr = 1e-5
[plan]
cuts = ["a", ["b", "c"]]
pin = { first = "pi" }
[fleet]
broker = "mqtt://me:se@cret@broker.local:1884"
simulate = [
    { name = "pi", memory = "1 MB", timetable = [{ at_s = 1, kill = true }] },
    { name = "pc", paced = [0.1, 0.2] },
]
"""


@pytest.fixture
def folder(tmp_path):
    with closing(RunFolder.create(tmp_path / "out", stem="net", now=NOW)) as made:
        yield made


def test_a_folder_is_named_by_time_and_model_and_never_taken_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        with closing(RunFolder.create(None, stem="net", now=NOW)) as made:
            names.append(str(made.path))
    first = "runs/20310203-040506-net"
    assert names == [first, f"{first}-2", f"{first}-3"]


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="never overwrites"):
        RunFolder.create(tmp_path, stem="net", now=NOW)
    with pytest.raises(ConfigError, match="never overwrites"):
        RunFolder.create(tmp_path / "file", stem="net", now=NOW)
    with pytest.raises(ConfigError, match="cannot be made"):
        RunFolder.create(tmp_path / "file" / "inside", stem="net", now=NOW)
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty", stem="net", now=NOW).close()


def test_the_resolved_file_repeats_the_run_without_the_password(tmp_path, folder):
    source = tmp_path / "run.toml"
    source.write_text(RUN)
    config = load(source, ["train.seed=5"])
    folder.write_config(config)
    written = folder.path / "run.toml"
    assert "cret" not in written.read_text()
    assert load(written, ["fleet.broker=mqtt://me:se@cret@broker.local:1884"]) == config


def test_relative_paths_are_resolved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "run.toml"
    source.write_text(RUN)
    text = resolved_toml(load(source.relative_to(tmp_path)))
    assert tomllib.loads(text)["model"]["path"] == str(tmp_path / "net.onnx")


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("mqtt://host", "mqtt://host"),
        ("mqtts://me@host:8883", "mqtts://me@host:8883"),
        ("mqtt://me:p@ss:w@host", "mqtt://me@host"),
        ("mqtt://:token@host:1", "mqtt://host:1"),
    ],
)
def test_passwords_are_taken_out_of_urls(url, safe):
    assert without_password(url) == safe


finite = st.floats(allow_nan=False, allow_infinity=False)
steps = st.builds(
    StepMetrics,
    step=st.integers(1, 9),
    epoch=st.integers(0, 9),
    loss=finite | st.none(),
    seconds=finite,
    bytes_sent=st.integers(0, 1 << 50),
)
evaluations = st.builds(
    EvalMetrics,
    step=st.integers(1, 9),
    epoch=st.integers(0, 9),
    seconds=finite,
    eval_loss=finite | st.none(),
    eval_accuracy=finite | st.none(),
)


@given(st.lists(steps | evaluations, max_size=6))
def test_metrics_come_back_as_they_were(tmp_path_factory, metrics):
    path = tmp_path_factory.mktemp("run") / "out"
    with closing(RunFolder.create(path, stem="net", now=NOW)) as folder:
        for line in metrics:
            folder.append(line)
    steps_read, evaluations_read = read_metrics(path / "metrics.jsonl")
    assert steps_read == [m for m in metrics if isinstance(m, StepMetrics)]
    assert evaluations_read == [m for m in metrics if isinstance(m, EvalMetrics)]


def test_a_line_is_in_the_file_at_once_with_the_promised_keys(folder):
    folder.append(StepMetrics(1, 0, math.nan, 0.5, 99))
    folder.append(EvalMetrics(1, 0, 0.7, 0.3, 0.9))
    folder.append(EvalMetrics(2, 0, 0.8, 0.3))
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "epoch": 0, "loss": None, "seconds": 0.5, "bytes_sent": 99},
        {"step": 1, "epoch": 0, "seconds": 0.7, "eval_loss": 0.3, "eval_accuracy": 0.9},
        {"step": 2, "epoch": 0, "seconds": 0.8, "eval_loss": 0.3},
    ]


def test_a_torn_last_line_is_forgiven_and_a_damaged_one_is_not(folder):
    path = folder.path / "metrics.jsonl"
    folder.append(StepMetrics(1, 0, 0.1, 0.5, 99))
    with path.open("a") as file:
        file.write('{"step": 2, "ep')
    assert len(read_metrics(path)[0]) == 1
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match="line 2 is damaged"):
        read_metrics(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_metrics(path.with_name("none"))


def test_the_model_is_replaced_whole_and_leaves_nothing_beside_it(folder):
    for data in (b"first", b"second"):
        path = folder.write_model(lambda path, data=data: path.write_bytes(data))
        assert path.read_bytes() == data
    names = {path.name for path in folder.path.iterdir()}
    assert names == {"metrics.jsonl", "trained.onnx"}


def test_what_a_model_needs_beside_it_comes_along(folder):
    def export(path):
        (path.parent / "weights").mkdir()
        (path.parent / "weights" / "w.bin").write_bytes(b"w")
        path.write_bytes(b"m")

    for _ in range(2):
        assert folder.write_model(export).read_bytes() == b"m"
        assert (folder.path / "weights" / "w.bin").read_bytes() == b"w"
    assert not (folder.path / ".partial").exists()


def test_a_model_that_cannot_be_written_is_a_clear_error(folder):
    (folder.path / "trained.onnx").mkdir()
    with pytest.raises(RunError, match=r"trained\.onnx cannot be written"):
        folder.write_model(lambda path: path.write_bytes(b"data"))
    assert {path.name for path in folder.path.iterdir()} == {
        "metrics.jsonl",
        "trained.onnx",
    }


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_a_clear_error(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with closing(RunFolder(tmp_path)) as full, pytest.raises(RunError, match="free space"):
        full.append(StepMetrics(1, 0, 0.1, 0.5, 99))


def points(svg):
    curve = ET.fromstring(svg).find("polyline").get("points")  # noqa: S314 - our own output
    return [tuple(map(float, pair.split(","))) for pair in curve.split()]


numbers = st.floats(-1e9, 1e9, allow_nan=False)


@given(st.lists(numbers, min_size=1, max_size=50))
def test_a_chart_is_xml_inside_its_frame_and_upside_down(values):
    placed = points(line_chart(list(enumerate(values)), x_name="a & b", y_name="<y>"))
    assert len(placed) == len(values)
    assert all(0 <= x <= 640 and 0 <= y <= 240 for x, y in placed)
    highest = max(range(len(values)), key=values.__getitem__)
    assert placed[highest][1] == min(y for _, y in placed)


def test_a_long_chart_is_thinned_but_keeps_its_peak():
    values = [(float(i), 1.0) for i in range(100_000)]
    values[31_415] = (31_415.0, 50.0)
    placed = points(line_chart(values, x_name="x", y_name="y"))
    assert len(placed) <= 802
    assert min(y for _, y in placed) < max(y for _, y in placed) - 100


def test_a_chart_without_a_finite_point_says_so():
    assert (
        line_chart([(1, math.nan)], x_name="x", y_name="y") == "<p>No y was recorded.</p>"
    )


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.links = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in {"href", "src"}]


ROWS = [
    DeviceRow("pc", 1, "vjp", 900, 0.5, 12_300, 0.01, 0.012, 1000, 1100),
    DeviceRow("<pi>", 0, "hybrid", 100, 0.9, 45_600),
]


def test_a_report_stands_alone_and_sets_predicted_beside_measured():
    metrics = [StepMetrics(i, 0, 1 / i, i / 10, 5) for i in range(1, 9)]
    checks = [EvalMetrics(8, 0, 0.8, 0.2, 0.975)]
    html = render(Report("net <1>", metrics, checks, ROWS, "cut at <relu>", "a = '&'"))
    page = Page(html)
    assert page.tags.count("svg") == 3
    assert page.tags.count("tr") == 3
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    assert page.links == []
    assert "<td>12.0 ms (10.0 ms)</td>" in html
    assert html.index("&lt;pi&gt;") < html.index("<td>pc</td>")
    assert "cut at &lt;relu&gt;" in html
    assert "0.9750" in html
    assert not re.search(r"https?://", html)


def test_a_report_of_a_run_that_never_stepped_is_a_page_too():
    html = render(Report("net", [], [], [], "", ""))
    assert "No step was finished" in html
    assert "svg" not in Page(html).tags
