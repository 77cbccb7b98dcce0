"""The house rules that no linter checks: sizes, doors, and what a device has to load."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("edgetrain", "coordinator", "device_agent")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SCRIPTS = sorted(
    path
    for folder in ("tests", "scripts", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60

# What an agent may load before its first stage: its dependencies and theirs.
DEVICE_LIBRARIES = frozenset(
    {"numpy", "onnxruntime", "paho", "msgspec", "ml_dtypes", "edgetrain", "device_agent"}
)
# Spelt in two parts, so that this file does not name them itself.
MACHINE_PATHS = ("/wo" + "rk/", "shared" + "/notes", "/home" + "/", "/root" + "/")
TEXT_ENDINGS = frozenset({".py", ".md", ".toml", ".service", ".html", ".yml", ".cfg", ""})
SKIPPED_FOLDERS = frozenset({"build", "dist", "runs", "__pycache__"})


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def function_lines(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def prints(path: Path) -> Iterator[int]:
    """Lines that call print."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
            yield node.lineno


def texts() -> Iterator[Path]:
    """Every text file of the project; other hidden folders hold caches and the like."""
    for top in ROOT.iterdir():
        if top.name == ".ci" or not (top.name.startswith(".") or top.suffix == ".egg-info"):
            for path in [top] if top.is_file() else top.rglob("*"):
                skipped = SKIPPED_FOLDERS.intersection(path.relative_to(ROOT).parts)
                if path.is_file() and path.suffix in TEXT_ENDINGS and not skipped:
                    yield path


def loaded_by(statement: str) -> frozenset[str]:
    """Top-level modules from outside the standard library that a statement loads."""
    report = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(  # noqa: S603 - nothing of it comes from outside
        [sys.executable, "-c", f"{statement}\n{report}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    names = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    return frozenset(names - sys.stdlib_module_names)


def test_every_module_says_what_it_is_for():
    silent = [relative(path) for path in MODULES if not ast.get_docstring(tree(path))]
    assert not silent


def test_every_module_fits_in_the_head():
    lines = {relative(path): len(path.read_text().splitlines()) for path in MODULES}
    long = {name: count for name, count in lines.items() if count > MAX_FILE_LINES}
    assert not long, f"over {MAX_FILE_LINES} lines; split by noun: {long}"


def test_every_function_fits_on_a_screen():
    long = {
        f"{relative(path)}: {name}": lines
        for path in MODULES + SCRIPTS
        for name, lines in function_lines(path)
        if lines > MAX_FUNCTION_LINES
    }
    assert not long, f"over {MAX_FUNCTION_LINES} lines: {long}"


def test_nothing_is_mocked():
    mocked = [
        relative(path)
        for path in MODULES + SCRIPTS
        if any(name.startswith("unittest.mock") for name in imports(path))
    ]
    assert not mocked


def test_only_the_coordinator_talks_to_the_terminal():
    talking = {
        relative(path): lines
        for path in MODULES
        if path.relative_to(ROOT).parts[0] != "coordinator" and (lines := [*prints(path)])
    }
    assert not talking, f"print outside the coordinator; log it: {talking}"


def test_every_module_has_its_layer():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c["type"] == "layers")
    placed = {name.strip() for layer in layers for name in layer.split("|")}
    top = {
        f"edgetrain.{path.stem}"
        for path in (ROOT / "edgetrain").iterdir()
        if path.name != "sim" and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    sim = {f"edgetrain.sim.{path.stem}" for path in (ROOT / "edgetrain/sim").glob("*.py")}
    packages = {"edgetrain.__init__", "edgetrain.sim.__init__"}
    assert placed == (top | sim | {"coordinator", "device_agent"}) - packages


def test_the_project_stands_on_its_own():
    named = {
        relative(path): word
        for path in texts()
        for word in MACHINE_PATHS
        if word in path.read_text()
    }
    assert not named


def test_the_file_walk_sees_the_project():
    seen = {relative(path) for path in texts()}
    assert {"README.md", "Makefile", ".ci/run", "scripts/check", "pyproject.toml"} <= seen
    assert {"coordinator/session.py", "tests/test_architecture.py"} <= seen


@pytest.mark.parametrize(
    "statement",
    [
        "import device_agent.agent",
        "import device_agent.cli",
        "import edgetrain.runtime.stage_worker, edgetrain.runtime.engines.onnxruntime",
        "import edgetrain.transport.mqtt",
    ],
)
def test_a_device_loads_only_what_it_must(statement: str):
    """Nothing of the coordinator's: a device's install does not even have it."""
    loaded = loaded_by(statement)
    assert {"onnx", "onnx_ir", "onnxscript", "coordinator"}.isdisjoint(loaded)
    brought = {name for name in loaded - DEVICE_LIBRARIES if not name.startswith("_")}
    assert brought <= loaded_by("import onnxruntime, ml_dtypes, msgspec, paho.mqtt.client")


def test_the_compiler_does_load_onnx():
    """Else the test above could not fail."""
    assert "onnx" in loaded_by("import edgetrain.compiler.load")
