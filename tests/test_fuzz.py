"""A few thousand of the mutants that `scripts/fuzz_frames.py` makes by the million."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "scripts" / "fuzz_frames.py"


def test_mutants_are_taken_or_refused_with_a_typed_error() -> None:
    outcome = runpy.run_path(str(SCRIPT))["fuzz"](10_000, 0)
    assert all(outcome.taken[kind] for kind in outcome.refused)
    assert sum(outcome.taken.values()) + sum(outcome.refused.values()) == 10_000
    assert outcome.growth_bytes < 64 << 20
