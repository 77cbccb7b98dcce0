"""What each gradient mode reaches, computes, holds and sends, on real agents.

    PYTHONPATH=.:tests python benchmarks/backprop_free.py --json modes.json \
        --svg docs/gradient-modes.svg [TASK ...]

Accuracy, activations and bytes are measured in one run a row; forward-pass equivalents are
counted (`mode_costs.py`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import free_tasks
from free_runs import run_config
from mode_costs import Work, forward_equivalents
from scatter import Point, page
from training import Wire, train

from edgetrain.estimator_spec import WEIGHTS, EstimatorSpec
from edgetrain.sim.fleet import SimDevice
from edgetrain.wire.frame import Kind, parse
from edgetrain.wire.topics import COORDINATOR, Channel

MAX_BODY_BYTES = 2 << 20
ONE = EstimatorSpec(1)
FOUR = EstimatorSpec(4)
KIB = 1024


@dataclass(frozen=True)
class Way:
    """One row: the modes of the stages, their cut, and how gradients are estimated."""

    label: str
    modes: tuple[str, ...]
    spec: EstimatorSpec = ONE
    cut: str = ""  # the suite's, if empty


@dataclass(frozen=True)
class Suite:
    """A task, the work of the stages of each of its cuts, and the rows of its table."""

    task: Callable[[], free_tasks.Task]
    cut: str
    work: dict[str, tuple[Work, ...]]
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class Row:
    """What came out of one run; bytes down and up are those of a training step."""

    task: str
    label: str
    cut: str
    accuracy: float
    forwards: float
    activation_bytes: tuple[int, ...]
    down_bytes: float
    up_bytes: float


@dataclass
class Tensors(Wire):
    """Counts the bytes between stages in training by kind, and keeps no message."""

    sent: Counter[Kind] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tap(self, source: str, to: str, channel: Channel, payload: bytes) -> None:
        del to
        if channel is not Channel.DATA or source == COORDINATOR:  # which sends samples
            return
        address = parse(payload, max_body_bytes=MAX_BODY_BYTES).address
        if not address.evaluation:
            with self.lock:
                self.sent[address.kind] += len(payload)


EXACT = Way("vjp", ("vjp", "vjp"))
FROZEN = Way("frozen", ("frozen", "vjp"))
LOCAL_VJP = Way("local_vjp", ("local_vjp", "vjp"))
CARRIED = ("forward_gradient", "forward_gradient")
COMMON = (
    EXACT,
    FROZEN,
    Way("hybrid K=1", ("hybrid", "vjp")),
    Way("hybrid K=4", ("hybrid", "vjp"), FOUR),
    Way("hybrid K=1, differences", ("hybrid", "vjp"), EstimatorSpec(1, form="forward")),
    LOCAL_VJP,
    Way("local K=1", ("local", "vjp")),
    Way("forward_gradient K=1", CARRIED),
    Way("weights K=4", CARRIED, EstimatorSpec(4, noise=WEIGHTS)),
    Way("spsa K=16", ("spsa", "spsa"), EstimatorSpec(16)),
)
STAYS = Way("identity in the middle", ("vjp", "identity", "vjp"), cut="middle")
PRETRAINED = (
    EXACT,
    FROZEN,
    Way("identity", ("identity", "vjp")),
    LOCAL_VJP,
    Way("hybrid K=4", ("hybrid", "vjp"), FOUR),
    Way("local K=1", ("local", "vjp")),
    STAYS,
)

EMBED, HEAD = 30 * 64 * 20, 64 * 7
SCORES = 20 * 20 * 64
BLOCK = (20 * 64 * 192, SCORES, SCORES, 20 * 64 * 64, 20 * 64 * 128, 20 * 128 * 64)
EXITS = BLOCK[3] + BLOCK[5]
TALL = Work((*BLOCK, HEAD))
SUITES = {
    "digits_mlp": Suite(
        free_tasks.digits_mlp,
        "last",
        {"last": (Work((8192, 8192), head=640), Work((640,)))},
        COMMON,
    ),
    "mnist_inverted": Suite(
        free_tasks.mnist_inverted,
        "convolutions",
        {"convolutions": (Work((39200, 56448), head=7840), Work((25088, 320)))},
        COMMON,
    ),
    "watch_transformer": Suite(
        free_tasks.watch_transformer,
        "first_two",
        {
            "first_two": (Work((EMBED, *BLOCK, *BLOCK), 2 * EXITS, 4 * HEAD), TALL),
            "middle": (Work((EMBED, *BLOCK)), Work(BLOCK, EXITS), TALL),
        },
        PRETRAINED,
    ),
}


def measure(name: str, suite: Suite, way: Way) -> Row:
    """Train once, and count."""
    task, cut, wire = suite.task(), way.cut or suite.cut, Tensors()
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(
            task, Path(folder), task.cuts[cut], way.spec, gradient=way.modes
        )
        devices = [SimDevice(f"device{number}") for number in range(len(way.modes))]
        outcome = train(config, Path(folder) / "run", devices, wire=wire)
    if outcome.score is None or outcome.score.accuracy is None:
        raise ValueError(f"{name}: the run was not evaluated")
    return Row(
        name,
        way.label,
        cut,
        outcome.score.accuracy,
        forward_equivalents(suite.work[cut], way.modes, way.spec),
        tuple(row.measured_activation_bytes or 0 for row in outcome.rows),
        wire.sent[Kind.ACTIVATION] / task.recipe.steps,
        wire.sent[Kind.COTANGENT] / task.recipe.steps,
    )


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| gradient | accuracy | forwards | activations, KiB | down, KiB | up, KiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        peaks = " / ".join(f"{b / KIB:.0f}" for b in row.activation_bytes)
        sent = f"{row.down_bytes / KIB:.1f} | {row.up_bytes / KIB:.1f}"
        lines.append(
            f"| {row.label} | {row.accuracy:.3f} | {row.forwards:.2f} | {peaks} | {sent} |"
        )
    return "\n".join(lines)


def plot(rows: Sequence[Row]) -> str:
    panels = {
        name: [Point(r.label, r.forwards, r.accuracy) for r in rows if r.task == name]
        for name in dict.fromkeys(row.task for row in rows)
    }
    name = "forward-pass equivalents a step, counted"
    return page(list(panels.items()), name, "accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", help=", ".join(SUITES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    asked = parser.parse_args()
    rows: list[Row] = []
    for name in asked.tasks or SUITES:
        found = [measure(name, SUITES[name], way) for way in SUITES[name].ways]
        print(f"\n{name}\n\n{table(found)}", flush=True)
        rows += found
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if asked.svg:
        asked.svg.write_text(plot(rows))


if __name__ == "__main__":
    main()
