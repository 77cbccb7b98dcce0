"""Peak memory of one training step beside PyTorch's, each in a process of its own.

    python benchmarks/memory.py [--models mlp,lenet] [--batches 8,32] [--json F] [--keep K]

Needs the oracle environment (`make oracle`) and Linux. One thread, SGD, one microbatch; the
split step has all but the last layer as a stage of its own, as in `step.py`. The columns,
in bytes of resident memory over a process that has trained a network of 170 weights:

    eager      PyTorch
    split      our two stages, on the engine's own kernels where these are faster
    recovery   part of `split`: the copy of the weights that a stage returns to after a
               fault, which eager has no counterpart of
    stash      part of `split`: what the forward hands to the backward
    ratio      (split - recovery) / eager

Loading is not part of a step; what it leaves behind counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import eager
import networks
import step
import torch
import toy

from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.stash import Keep
from edgetrain.compiler.trainable import select_trainable
from edgetrain.manifest import Mode
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine

HERE = Path(__file__).parent
STEPS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One network at one batch size, in bytes."""

    model: str
    batch: int
    eager: int
    split: int
    recovery: int
    stash: int

    @property
    def ratio(self) -> float:
        return (self.split - self.recovery) / self.eager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(networks.NETWORKS))
    parser.add_argument("--batches", default="8,32")
    parser.add_argument("--keep", type=Keep, choices=list(Keep), default=Keep.LEAST)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        small = torch.zeros(toy.BATCH, toy.INPUTS)
        write_bundles(toy.toy(), small, Path(folder, "toy"), options.keep)
        for name in options.models.split(","):
            for batch in map(int, options.batches.split(",")):
                rows.append(measure(name, batch, Path(folder), options.keep))
                print(_line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def measure(name: str, batch: int, folder: Path, keep: Keep) -> Row:
    model, x, _ = eager.draw(name, batch)
    bundles = folder / f"{name}-{batch}"
    write_bundles(model, x, bundles, keep)
    (theirs,) = _run("peak_eager.py", name, batch, STEPS)
    ours, recovery, stash = _run("peak_split.py", folder / "toy", bundles, STEPS)
    return Row(name, batch, theirs, ours, recovery, stash)


def write_bundles(
    model: torch.nn.Module, x: torch.Tensor, folder: Path, keep: Keep
) -> None:
    """Compile all but the last layer as one stage and the last as another."""
    program = normalise(step.exported(model, x), batch=len(x))
    trainable = select_trainable(program, "all")
    cuts = CutFinder(program, trainable).valid()[-1:]
    recipe = Recipe(
        trainable,
        "softmax_cross_entropy",
        (Mode.VJP, Mode.VJP),
        blocks=(OnnxRuntimeEngine().block,) * 2,
        keep=keep,
    )
    folder.mkdir()
    for stage, bundle in enumerate(compile_stages(program, cuts, recipe)):
        (folder / f"{stage}.bundle").write_bytes(bundle.encode())


def _run(script: str, *arguments: object) -> Sequence[int]:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603  our own scripts
    return [int(word) for word in done.stdout.split()]


def _line(row: Row) -> str:
    return (
        f"{row.model:10} batch {row.batch:3}  eager {row.eager / 1e6:7.1f} MB"
        f"  split {row.split / 1e6:7.1f} MB  recovery {row.recovery / 1e6:5.1f} MB"
        f"  stash {row.stash / 1e6:6.1f} MB  ratio {row.ratio:.2f}"
    )


if __name__ == "__main__":
    main()
