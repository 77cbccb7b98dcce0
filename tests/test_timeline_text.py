"""Timelines as people and trace viewers read them."""

from __future__ import annotations

import json

import pytest
from timeline_cases import balanced, random_case

from edgetrain.errors import PlanError
from edgetrain.planner.chrome_trace import chrome_trace
from edgetrain.planner.timeline import play
from edgetrain.planner.timeline_text import chart, summary, text


def test_a_chart_shows_each_stage_s_microbatches():
    drawn = chart(play(balanced(2, 2, "1f1b"), steps=1), columns=43)
    head, first, second = drawn.splitlines()
    assert head == "1f1b, 2 microbatches: 9 s, 250 ms a column"
    assert first.startswith("0 d0 |F0--F1--........B0======....B1======|")
    assert second.startswith("1 d1 |....F0--B0======F1--B1======")


@pytest.mark.parametrize("seed", range(20))
def test_no_line_is_too_long(seed):
    timeline = play(random_case(seed, own_devices=False))
    for columns in (40, 100):
        drawn = text(timeline, columns)
        assert max(map(len, drawn.splitlines())) <= columns
    assert len(chart(timeline).splitlines()) == len(timeline.case.stages) + 1


def test_the_summary_says_what_the_time_went_into():
    lines = summary(play(balanced(3, 4, "gpipe", link=(1e6, 1e6)))).splitlines()
    assert lines[0].startswith("A step takes ")
    assert "hop 0->1: links" in "\n".join(lines)
    assert any(line.startswith("2      d2") for line in lines)


def test_a_chart_needs_room():
    with pytest.raises(PlanError, match="39 columns"):
        chart(play(balanced(2, 2)), columns=39)


@pytest.mark.parametrize("seed", range(10))
def test_a_trace_holds_every_span_in_microseconds(seed):
    timeline = play(random_case(seed, own_devices=False), steps=2, warm_up=0)
    trace = json.loads(chrome_trace(timeline))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    nodes = [node for node in timeline.nodes if node.kind != "commit"]
    assert len(spans) == len(nodes)
    assert [s["ts"] for s in spans] == pytest.approx([n.start_s * 1e6 for n in nodes])
    assert max(s["ts"] + s["dur"] for s in spans) >= timeline.end_s * 1e6 - 1e-3
    names = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    rows = {(e["pid"], e["tid"]) for e in names if e["name"] == "thread_name"}
    assert {(s["pid"], s["tid"]) for s in spans} <= rows
    assert sum(s["args"]["critical"] for s in spans) == sum(
        timeline.nodes[number].kind != "commit" for number in timeline.path.nodes
    )
    processes = {e["args"]["name"] for e in names if e["name"] == "process_name"}
    assert {device.name for device in timeline.case.devices} <= processes
