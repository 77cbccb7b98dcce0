"""Times of one training step beside PyTorch's, as ratios of interleaved runs.

    python benchmarks/step.py [--models mlp,lenet] [--batches 1,8,32] [--compile] [--json F]

Needs the oracle environment (`make oracle`). One thread, SGD. The columns:

    fused      loss, gradients and update of the whole model, one graph
    portable   the same without the engine's own kernels
    split      all but the last layer as a stage of its own: forward, stash, backward
    floor      three times a forward with constant weights
    compile    torch.compile, with --compile

each divided by a step of PyTorch eager in the same round; medians over the rounds.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import eager
import networks
import numpy as np
import onnx
import onnxruntime as ort
import torch

from edgetrain.bundle import Bundle
from edgetrain.compiler.cut import CutFinder
from edgetrain.compiler.export import export
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.program import Program
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.trainable import select_trainable
from edgetrain.manifest import Mode
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.choice import choose
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.stage import Stage

OPTIMIZER = OptimizerSpec("sgd", LRSpec(eager.LR))
ENGINE = OnnxRuntimeEngine()


@dataclass(frozen=True, slots=True)
class Row:
    """One network at one batch size; milliseconds of eager, and ratios to it."""

    model: str
    batch: int
    eager_ms: float
    fused: float
    portable: float
    split: float
    floor: float
    compiled: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(networks.NETWORKS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.models.split(","):
        for batch in map(int, options.batches.split(",")):
            row = measure(name, batch, options.rounds, compiled=options.compile)
            print(_line(row), flush=True)
            rows.append(row)
    for column in ("fused", "portable", "split"):
        values = [getattr(row, column) for row in rows]
        print(f"geometric mean {column}: {statistics.geometric_mean(values):.3f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def measure(name: str, batch: int, rounds: int, *, compiled: bool) -> Row:
    model, x, labels = eager.draw(name, batch)
    original = exported(model, x)
    program = normalise(original, batch=batch)
    steps: dict[str, eager.Step] = {
        "eager": eager.eager_step(model.train(), x, labels),
        "fused": our_step(_bundles(program, split=False), x.numpy(), labels.numpy()),
        "portable": our_step(
            _bundles(program, split=False, fast=False), x.numpy(), labels.numpy()
        ),
        "split": our_step(_bundles(program, split=True), x.numpy(), labels.numpy()),
        "floor": forward_step(export(original, program, {}), x.numpy()),
    }
    if compiled:
        steps["compile"] = eager.eager_step(torch.compile(model), x, labels)
    times = eager.interleave(steps, rounds)
    eager_s = np.array(times["eager"])
    ratio = {k: float(np.median(np.array(v) / eager_s)) for k, v in times.items()}
    return Row(
        name,
        batch,
        1e3 * float(np.median(eager_s)),
        ratio["fused"],
        ratio["portable"],
        ratio["split"],
        3 * ratio["floor"],
        ratio.get("compile"),
    )


def exported(model: torch.nn.Module, x: torch.Tensor) -> onnx.ModelProto:
    """The file a user would have: BatchNorm kept apart, batch left open."""
    torch.backends.mha.set_fastpath_enabled(False)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(),
            (x,),
            buffer,
            dynamo=False,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
        )
    return onnx.load_from_string(buffer.getvalue())


def our_step(bundles: Sequence[Bundle], x: np.ndarray, labels: np.ndarray) -> eager.Step:
    def make(bundle: Bundle) -> Stage:
        return Stage(bundle, ENGINE, OPTIMIZER, microbatches=1, seed=0)

    stages = [choose(bundle, ENGINE.block, make)[0] for bundle in bundles]
    tick = Tick(0, 0)

    def step() -> None:
        values = {"x": x}
        for stage in stages:
            values = stage.forward(tick, values)
        arriving = {"labels": labels}
        for stage in reversed(stages):
            arriving = stage.backward(tick, arriving).cotangents
        for stage in stages:
            stage.update(0)

    return step


def forward_step(model: onnx.ModelProto, x: np.ndarray) -> eager.Step:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(model.SerializeToString(), options)

    def step() -> None:
        session.run(None, {"x": x})

    return step


def _bundles(program: Program, *, split: bool, fast: bool = True) -> list[Bundle]:
    trainable = select_trainable(program, "all")
    cuts = CutFinder(program, trainable).valid()[-1:] if split else ()
    stages = len(cuts) + 1
    recipe = Recipe(
        trainable,
        "softmax_cross_entropy",
        (Mode.VJP,) * stages,
        blocks=(ENGINE.block,) * stages if fast else (),
    )
    return compile_stages(program, cuts, recipe)


def _line(row: Row) -> str:
    text = (
        f"{row.model:10} batch {row.batch:3}  eager {row.eager_ms:8.2f} ms"
        f"  fused {row.fused:5.2f}  portable {row.portable:5.2f}  split {row.split:5.2f}"
        f"  floor {row.floor:5.2f}"
    )
    return text if row.compiled is None else f"{text}  compile {row.compiled:5.2f}"


if __name__ == "__main__":
    main()
