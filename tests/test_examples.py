"""The README's first own model: the example is the same, and does what it says."""

from __future__ import annotations

import json
import tomllib

import pytest
from readme import ROOT, blocks, commands, section, type_in

from device_agent.config import load as load_agent
from edgetrain.config import load

EXAMPLE = ROOT / "examples" / "own_model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the example with its model and data made."""
    path = tmp_path_factory.mktemp("own_model")
    for name in ("make_model.py", "run.toml", "agent.toml"):
        (path / name).write_text((EXAMPLE / name).read_text())
    type_in("python make_model.py", path)
    return path


def test_the_readme_shows_the_example_s_run_file():
    (shown, *_) = blocks(section("## Your own model"), "toml")
    assert tomllib.loads(shown) == tomllib.loads((EXAMPLE / "run.toml").read_text())


def test_the_example_files_are_valid(folder):
    config = load(folder / "run.toml")
    assert [device.name for device in config.fleet.simulate] == ["laptop", "board"]
    agent = load_agent(folder / "agent.toml")
    assert agent.datasets["watch"].train == folder / "train.npz"


def test_the_readme_s_first_commands_work(folder):
    lines = commands(section("## Your own model"))
    change, make, inspect, plan, train, evaluate = lines
    assert change == "cd examples/own_model"
    assert make.startswith("python make_model.py")
    type_in(inspect, folder)
    assert "2 stages" in type_in(plan, folder)
    type_in(f"{train} --set train.epochs=4", folder)
    score = json.loads(type_in(f"{evaluate} --json", folder))
    untrained = "edgetrain evaluate model.onnx --data eval.npz --json"
    before = json.loads(type_in(untrained, folder))
    assert score["samples"] == 360
    assert score["accuracy"] > 0.9 > 0.3 > before["accuracy"]


def test_the_readme_lists_what_a_run_folder_holds(folder):
    text = section("## Your own model")
    written = {path.name for path in (folder / "runs" / "first").iterdir()}
    assert written == {name for name in written if f"`{name}`" in text}
    assert {"trained.onnx", "metrics.jsonl"} <= written


def test_the_readme_s_test_passes(folder):
    (snippet,) = blocks(section("## Test it on a fleet you do not own"), "python")
    (folder / "test_own_model.py").write_text(snippet)
    assert "1 passed" in type_in(
        "python -m pytest -p no:cacheprovider test_own_model.py", folder
    )
