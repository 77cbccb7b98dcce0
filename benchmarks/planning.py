"""How long planning takes, and how sure the plans are.

    python benchmarks/planning.py [--json FILE] [--rounds 3]

Fleets of unlike devices around a model of 96 layers, half of its size that of ViT-Large
at batch 8: random speeds from 1 to 6, links from 0.5 to 2 Gbit/s, a stash for each
microbatch in flight. Times are the best of the rounds, in one process on one core, from
problem to plan, with the reasons for devices left out. A gap of 0 is a proof that no plan
is faster; otherwise none is faster by more than that part.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from edgetrain.planner.problem import Device, Layer, Objective, Problem
from edgetrain.planner.solution import plan

LAYERS = 96
MICROBATCHES = 32
# name -> devices of each type
FLEETS: dict[str, tuple[int, ...]] = {
    "16 of 2 types": (8, 8),
    "32 of 4 types": (8, 8, 8, 8),
    "8 distinct": (1,) * 8,
    "12 distinct": (1,) * 12,
    "16 distinct": (1,) * 16,
    "24 distinct": (1,) * 24,
    "32 distinct": (1,) * 32,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One fleet and objective; `time_s` is what the plan is predicted to take."""

    fleet: str
    objective: str
    planning_s: float
    gap: float
    stages: int
    time_s: float


def fleet_problem(counts: Sequence[int], objective: Objective, seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    base_s = rng.uniform(0.05, 0.6, LAYERS)
    outputs = rng.choice([6.4e6, 12.8e6, 32e6], LAYERS)
    layers = tuple(
        Layer(f"layer {i}", 30e6, float(size), stash_bytes=float(rng.uniform(5e6, 2e7)))
        for i, size in enumerate(outputs)
    )
    devices = []
    for kind, count in enumerate(counts):
        times = base_s / rng.uniform(1.0, 6.0) * rng.uniform(0.9, 1.1, LAYERS)
        forward_s = tuple(map(float, times))
        backward_s = tuple(map(float, 2.0 * times))
        memory_bytes = float(rng.choice([2e9, 4e9, 8e9]))
        link = float(rng.uniform(0.5, 2.0) * 125e6)
        devices += [
            Device(f"t{kind}-{i}", forward_s, backward_s, memory_bytes, link, 1e-3)
            for i in range(count)
        ]
    return Problem(
        layers,
        tuple(devices),
        objective=objective,
        microbatches=MICROBATCHES if objective == "training" else 1,
    )


def measure(fleet: str, objective: Objective, rounds: int) -> Row:
    problem = fleet_problem(FLEETS[fleet], objective, seed=0)
    times_s = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        solution = plan(problem)
        times_s.append(time.perf_counter() - start_s)
    placement = solution.placement
    stages = len(placement.stages)
    return Row(fleet, objective, min(times_s), solution.gap, stages, placement.time_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    print(f"{'devices':16}{'objective':12}{'planning':>10}{'gap':>8}{'stages':>8}")
    for fleet in FLEETS:
        for objective in ("inference", "training"):
            row = measure(fleet, objective, max(1, options.rounds))
            rows.append(row)
            print(
                f"{row.fleet:16}{row.objective:12}{row.planning_s:8.2f} s"
                f"{row.gap:8.1%}{row.stages:8}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
