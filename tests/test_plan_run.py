"""`edgetrain plan RUN.toml` and `edgetrain simulate RUN.toml`: a run before it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.cli import main
from tests.plan_task import write_chain

RUN = """
[model]
path = "chain.onnx"
[data]
train = "train.npz"
[train]
batch_size = 64
microbatches = 4
[plan]
stages = 2
[fleet]
simulate = [
  {name = "a", speed = 0.1, link = "100 Mbit/s"},
  {name = "b", speed = 0.05, link = "100 Mbit/s"},
]
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGETRAIN_CACHE", "off")
    write_chain(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_a_plan_is_shown_with_its_steps(run_file, capsys):
    assert main(["plan", str(run_file)]) == 0
    shown = capsys.readouterr().out
    for word in ("device", "sends on", "64 samples a step in 4 microbatches", "|F0"):
        assert word in shown


def test_a_plan_as_json_and_as_a_trace(run_file, capsys, tmp_path):
    trace = tmp_path / "trace.json"
    assert main(["plan", str(run_file), "--json", "--trace", str(trace)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {stage["device"] for stage in plan["stages"]} == {"a", "b"}
    assert len(plan["hops"]) == 1
    assert plan["predicted_step_s"] > 0
    assert json.loads(trace.read_text())["traceEvents"]


def test_settings_on_the_command_line_count(run_file, capsys):
    assert main(["plan", str(run_file), "--json", "--set", "plan.stages=1"]) == 0
    assert len(json.loads(capsys.readouterr().out)["stages"]) == 1


def test_a_device_left_out_is_explained(run_file, capsys):
    run_file.write_text(RUN.replace("stages = 2", 'stages = "auto"').replace("100", "1"))
    assert main(["plan", str(run_file)]) == 0
    assert "gets no stage: with it the step would take" in capsys.readouterr().out


def test_a_run_is_simulated(run_file, capsys):
    assert main(["simulate", str(run_file), "--steps", "6"]) == 0
    shown = capsys.readouterr().out
    for word in ("a step", "samples/s", "busy: ", "links: "):
        assert word in shown
    assert main(["simulate", str(run_file), "--steps", "6", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    assert len(run["step_end_s"]) == 6
    assert set(run["busy"]) == {"a", "b"}
    assert run["killed"] is None


def test_what_the_timetable_says_happens(run_file, capsys):
    """Each run guesses the machine's speed anew, so steps are compared within a run."""

    def ends(changes: str) -> tuple[list[float], str | None]:
        text = RUN.replace('b", speed = 0.05', f'b", speed = 0.05, timetable = [{changes}]')
        run_file.write_text(text)
        assert main(["simulate", str(run_file), "--steps", "40", "--json"]) == 0
        run = json.loads(capsys.readouterr().out)
        return run["step_end_s"], run["killed"]

    calm, _ = ends("")
    slowed, _ = ends(f"{{at_s = {calm[9]}, speed = 0.0005}}")
    assert slowed[-1] - slowed[-2] > 10 * (slowed[2] - slowed[1])
    cut, killed = ends(f"{{at_s = {calm[9]}, kill = true}}")
    assert killed == "b"
    assert len(cut) < 40


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "either a run file, or --profiles"),
        (["plan", "RUN", "--profiles", "p.json"], "either a run file, or --profiles"),
        (["plan", "RUN", "--set", 'fleet.devices=["x"]'], "lacks the simulated a, b"),
        (["plan", "RUN", "--set", "fleet.simulate=[]"], "not simulated"),
        (["simulate", "RUN", "--steps", "0"], "at least 1"),
        (["plan", "RUN", "--trace", "/nowhere/t.json"], "cannot be written"),
        (["plan", "RUN", "--set", "plan.stages=20"], "20 stages"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(run_file, capsys, arguments, words):
    given = [str(run_file) if word == "RUN" else word for word in arguments]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
