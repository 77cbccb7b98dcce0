"""docs/planning.md: what it tells people to run prints what it says."""

from __future__ import annotations

import json
import sys

from readme import blocks, section, type_in

PAGE = "docs/planning.md"


def printed(heading, folder):
    """What the section's Python prints, run as it stands."""
    (code,) = blocks(section(heading, PAGE), "python")
    (folder / "example.py").write_text(code)
    return type_in(f"{sys.executable} example.py", folder)


def test_the_timeline_is_drawn_as_shown(tmp_path):
    (shown,) = blocks(section("## The timeline", PAGE), "text")
    assert printed("## The timeline", tmp_path) == shown
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    code = (tmp_path / "example.py").read_text().replace('"1f1b"', '"1f1b-eager"')
    (tmp_path / "eager.py").write_text(code)
    assert "A step takes 1.63 s" in type_in(f"{sys.executable} eager.py", tmp_path)


def test_the_fleet_is_rehearsed_as_shown(tmp_path):
    heading = "## Devices you do not have"
    ends = printed(heading, tmp_path).strip()
    assert f"`{ends}`" in section(heading, PAGE)
