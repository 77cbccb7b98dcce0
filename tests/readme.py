"""The README's fenced blocks, so that tests run what people are told to type."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

BASH = shutil.which("bash") or "/bin/bash"
ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def section(heading: str, page: str = "README.md") -> str:
    """What stands under a heading, up to the next one of the same rank."""
    text = (ROOT / page).read_text()
    rank = heading.partition(" ")[0]
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, f"{page} has no heading {heading!r}"
    return re.split(rf"^{rank} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def blocks(text: str, kind: str) -> list[str]:
    """The bodies of the fenced blocks of one kind, in order."""
    return [match["body"] for match in _FENCE.finditer(text) if match["kind"] == kind]


def commands(text: str) -> list[str]:
    """The lines of all shell blocks."""
    return [line for body in blocks(text, "sh") for line in body.splitlines()]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of a user in whose environment edgetrain is installed as in this one."""
    tools = str(Path(sys.executable).parent)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **(more or {})}


def type_in(line: str, folder: Path) -> str:
    """Run a shell line; return what it writes, fail when it fails."""
    done = subprocess.run(  # noqa: S603 - the README's own lines
        [BASH, "-c", line],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return done.stdout
