"""Our training step beside onnxruntime-training's, as a Markdown table.

    python benchmarks/compare.py OURS.json THEIRS.json [--column fused|portable|split]

OURS is written by step.py, THEIRS by ort_training.py. Each ratio is to PyTorch eager in
its own process; the last column is ours divided by theirs, so below 1 ours is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path

Case = tuple[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ours", type=Path)
    parser.add_argument("theirs", type=Path)
    parser.add_argument("--column", choices=("fused", "portable", "split"), default="fused")
    options = parser.parse_args()
    ours = ratios(options.ours, options.column)
    theirs = ratios(options.theirs, "ort_training")
    if not ours.keys() & theirs.keys():
        parser.error(f"{options.ours} and {options.theirs} have no case in common")
    print(table(ours, theirs, options.column))


def ratios(path: Path, column: str) -> dict[Case, float]:
    rows = json.loads(path.read_text())
    return {(row["model"], row["batch"]): row[column] for row in rows}


def table(ours: Mapping[Case, float], theirs: Mapping[Case, float], column: str) -> str:
    """A row for each case of ours; the geometric mean is over those with both."""
    heads = f"{column} / eager | ort-training / eager | {column} / ort-training"
    lines = [f"| model | batch | {heads} |", "|---|---:|---:|---:|---:|"]
    for (model, batch), ratio in ours.items():
        other = theirs.get((model, batch))
        rest = "- | -" if other is None else f"{other:.2f} | {ratio / other:.2f}"
        lines.append(f"| {model} | {batch} | {ratio:.2f} | {rest} |")
    both = [case for case in ours if case in theirs]
    mine = statistics.geometric_mean(ours[case] for case in both)
    other = statistics.geometric_mean(theirs[case] for case in both)
    name = f"geometric mean of {len(both)}"
    lines.append(f"| {name} | | {mine:.2f} | {other:.2f} | {mine / other:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
