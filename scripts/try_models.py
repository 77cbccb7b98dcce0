"""Try every real model in a process of its own, and write docs/models.md.

Each file in `.cache/inputs/models` (see `fetch_models.py` and `export_models.py`) is
normalised, differentiated, its gradient compared with central differences, trained for a
few steps and exported; or the compiler's refusal is recorded. Results gather in
`.cache/models.jsonl`, from where the document is made.

Run as ``python scripts/try_models.py [--cache DIR] [--report-only] [NAME ...]``.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
from model_report import write_report
from model_settings import SETTINGS
from trial import Outcome, Setting, attempt
from wheels import CACHE

TIME_LIMIT_S: Final = 600
MEMORY_LIMIT_BYTES: Final = 12 << 30
DOCUMENT: Final = Path(__file__).resolve().parent.parent / "docs" / "models.md"


def in_process(name: str, cache: Path) -> Outcome:
    """Try a model in a process of its own, within limits of time and memory."""
    command = [sys.executable, __file__, "--cache", str(cache), "--here", name]
    started = time.monotonic()
    try:
        done = subprocess.run(  # noqa: S603 - nothing of it comes from outside
            command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(name, reason=f"not done after {TIME_LIMIT_S} s")
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        return Outcome(name, reason=last or f"ended with code {done.returncode}")
    outcome = msgspec.json.decode(done.stdout, type=Outcome)
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def here(name: str, cache: Path) -> None:
    """Try a model in this process and print the outcome as JSON."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    path = cache / "inputs" / "models" / f"{name}.onnx"
    outcome = attempt(name, path, SETTINGS.get(name, Setting()))
    print(msgspec.json.encode(outcome).decode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="default: %(default)s")
    parser.add_argument("--here", action="store_true", help="no process, no document")
    parser.add_argument("--report-only", action="store_true", help="use earlier results")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all files")
    arguments = parser.parse_args()
    folder = arguments.cache / "inputs" / "models"
    names = arguments.names or sorted(path.stem for path in folder.glob("*.onnx"))
    if arguments.here:
        here(*names, arguments.cache)
        return
    results = arguments.cache / "models.jsonl"
    known = read_results(results)
    for name in [] if arguments.report_only else names:
        known[name] = outcome = in_process(name, arguments.cache)
        print(f"{name}: {outcome.outcome} {outcome.reason[:200]}", flush=True)
        lines = [msgspec.json.encode(known[key]) for key in sorted(known)]
        results.write_bytes(b"\n".join(lines) + b"\n")
    write_report(known.values(), DOCUMENT)


def read_results(path: Path) -> dict[str, Outcome]:
    if not path.exists():
        return {}
    lines = path.read_bytes().splitlines()
    outcomes = [msgspec.json.decode(line, type=Outcome) for line in lines]
    return {outcome.name: outcome for outcome in outcomes}


if __name__ == "__main__":
    main()
