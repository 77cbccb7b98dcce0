import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMPARE = Path(__file__).parents[1] / "benchmarks" / "compare.py"


def row(model, batch, **ratios):
    return {"model": model, "batch": batch, "eager_ms": 1.0, **ratios}


@pytest.fixture
def compared(tmp_path):
    def run(ours, theirs, *options):
        files = [tmp_path / "ours.json", tmp_path / "theirs.json"]
        for file, rows in zip(files, (ours, theirs), strict=True):
            file.write_text(json.dumps(rows))
        command = [sys.executable, COMPARE, *files, *options]
        return subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=30, check=False
        )

    return run


def cells(table):
    return [re.split(r"\s*\|\s*", line)[1:-1] for line in table.splitlines()[2:]]


OURS = [
    row("mlp", 1, fused=0.5, portable=0.8),
    row("mlp", 8, fused=0.5, portable=0.8),
    row("unet", 1, fused=9.0, portable=9.0),
]
THEIRS = [row("mlp", 1, ort_training=0.25), row("mlp", 8, ort_training=1.0)]


def test_the_mean_is_over_the_cases_both_have(compared):
    done = compared(OURS, THEIRS)
    assert done.returncode == 0, done.stderr
    assert cells(done.stdout) == [
        ["mlp", "1", "0.50", "0.25", "2.00"],
        ["mlp", "8", "0.50", "1.00", "0.50"],
        ["unet", "1", "9.00", "-", "-"],
        ["geometric mean of 2", "", "0.50", "0.50", "1.00"],
    ]


def test_another_column_of_ours_can_be_compared(compared):
    done = compared(OURS, THEIRS, "--column", "portable")
    assert cells(done.stdout)[0] == ["mlp", "1", "0.80", "0.25", "3.20"]


def test_no_common_case_is_an_error_that_names_the_files(compared):
    done = compared(OURS[2:], THEIRS)
    assert done.returncode == 2
    assert "no case in common" in done.stderr
