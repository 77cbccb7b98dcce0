"""Predicted stage times beside measured ones, before and after learning from one stage.

    python benchmarks/latency_model.py [--models lenet] [--batches 8] [--cpu] [--json F]

Needs the oracle environment (`make oracle`). First the machine is probed as by
`edgetrain-agent probe`, on one thread; with --cpu everything is measured in CPU seconds of
the process, for a machine that has other work too. Each network is cut into stages of about
equal arithmetic, and each is timed, forward and backward, as an agent would run it. An
error is the sum over a network's stages of |predicted - measured|, as a share of what they
took; each stage is predicted

    speed      from one speed of matrix products
    profile    from the profile
    one        from the profile, and the time of the stage before it
    others     from the profile, and the times of all other stages of the network
    own        likewise, and its own
    step       the sum of all, by `others`, with its sign
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import eager
import networks
import step

from device_agent.measure import Measurement, measure
from device_agent.probe import flop_per_s
from device_agent.probe_set import load
from device_agent.timing import Clock, typical
from edgetrain.bundle import Bundle
from edgetrain.compiler.cut import Cut, CutFinder
from edgetrain.compiler.features import layer_features
from edgetrain.compiler.normalise import normalise
from edgetrain.compiler.stage import Recipe, compile_stages
from edgetrain.compiler.trainable import select_trainable
from edgetrain.manifest import Mode
from edgetrain.op_groups import LayerFeatures
from edgetrain.planner.latency_model import LatencyModel
from edgetrain.runtime.choice import choose
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.stage import Stage, _made_up

STAGES = 4
PASSES = 30


@dataclass(frozen=True, slots=True)
class Timed:
    """One stage: what it does, and what it took."""

    features: LayerFeatures
    forward_s: float
    backward_s: float
    fused: bool

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s

    def predicted_s(self, model: LatencyModel) -> float:
        if self.fused:
            return model.fused_s(self.features)
        return model.forward_s(self.features) + model.backward_s(self.features)

    def teach(self, model: LatencyModel) -> LatencyModel:
        return model.learn(self.features, self.forward_s, self.backward_s, fused=self.fused)


@dataclass(frozen=True, slots=True)
class Row:
    """Errors of one network at one batch size."""

    model: str
    batch: int
    stages: int
    measured_ms: float
    speed: float
    profile: float
    one: float
    others: float
    own: float
    step: float


COLUMNS = ("speed", "profile", "one", "others", "own")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--models", default=",".join(networks.NETWORKS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    plan = Measurement("here", "", clock, lambda *_: None, threads=1)
    start = LatencyModel.of(measure(plan, load()).profile)
    plain = LatencyModel.of_speed(flop_per_s())
    engine = OnnxRuntimeEngine()
    rows = []
    for name in options.models.split(","):
        for batch in map(int, options.batches.split(",")):
            timed = stages(name, batch, engine, clock)
            rows.append(compare(name, batch, timed, start, plain))
            print(_line(rows[-1]), flush=True)
    for column in COLUMNS:
        errors = [getattr(row, column) for row in rows]
        print(f"median {column}: {100 * statistics.median(errors):.0f} %")
    print(f"median |step|: {100 * statistics.median(abs(row.step) for row in rows):.0f} %")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def stages(name: str, batch: int, engine: OnnxRuntimeEngine, clock: Clock) -> list[Timed]:
    """The network's stages, compiled and timed in turn."""
    model, x, _ = eager.draw(name, batch)
    program = normalise(step.exported(model, x), batch=batch)
    trainable = select_trainable(program, "all")
    finder = CutFinder(program, trainable)
    cuts = even(finder)
    end = finder.layers()[-1].output
    layers = finder.between([*cuts, end])
    features = layer_features(program, trainable, finder.nodes, layers)
    recipe = Recipe(
        trainable,
        "softmax_cross_entropy",
        (Mode.VJP,) * len(layers),
        blocks=(engine.block,) * len(layers),
    )
    bundles = compile_stages(program, cuts, recipe)
    return [
        timed(bundle, work, engine, clock)
        for bundle, work in zip(bundles, features, strict=True)
    ]


def even(finder: CutFinder) -> list[Cut]:
    """Cuts after about equal shares of the arithmetic."""
    layers = finder.layers()
    count = min(STAGES, len(layers))
    total, done, cuts = sum(layer.flop for layer in layers), 0, []
    for position, layer in enumerate(layers[:-1]):
        done += layer.flop
        left = count - 1 - len(cuts)
        due = done >= total * (len(cuts) + 1) / count
        if left and (due or len(layers) - 1 - position == left):
            cuts.append(layer.output)
    return cuts


def timed(
    bundle: Bundle, features: LayerFeatures, engine: OnnxRuntimeEngine, clock: Clock
) -> Timed:
    def load(bundle: Bundle) -> Stage:
        return Stage(bundle, engine, step.OPTIMIZER, microbatches=1, seed=0)

    stage, _ = choose(bundle, engine.block, load)
    manifest = stage.manifest
    received = _made_up(manifest.receives)
    back = tuple(s for s in manifest.sends if s.name in manifest.cotangents_in)
    arriving = _made_up((*back, *((manifest.labels,) if manifest.labels else ())))
    forwards, backwards = [], []
    for _ in range(PASSES):
        start = clock()
        stage.forward(Tick(0, 0), received)
        middle = clock()
        stage.backward(Tick(0, 0), arriving)
        forwards.append(middle - start)
        backwards.append(clock() - middle)
    return Timed(features, typical(forwards), typical(backwards), manifest.is_last)


def compare(
    name: str,
    batch: int,
    timed: Sequence[Timed],
    start: LatencyModel,
    plain: LatencyModel,
) -> Row:
    stages = range(len(timed))
    models = {
        "speed": [plain for _ in stages],
        "profile": [start for _ in stages],
        "one": [timed[n - 1].teach(start) for n in stages],
        "others": [_taught(start, [timed[m] for m in stages if m != n]) for n in stages],
        "own": [_taught(start, timed) for _ in stages],
    }
    total_s = sum(one.seconds for one in timed)
    errors, sums = {}, {}
    for column, chosen in models.items():
        predicted = [t.predicted_s(m) for t, m in zip(timed, chosen, strict=True)]
        wrong = [abs(p - t.seconds) for p, t in zip(predicted, timed, strict=True)]
        errors[column], sums[column] = sum(wrong) / total_s, sum(predicted) / total_s - 1
    return Row(name, batch, len(timed), 1e3 * total_s, **errors, step=sums["others"])


def _taught(model: LatencyModel, shown: Sequence[Timed]) -> LatencyModel:
    for one in shown:
        model = one.teach(model)
    return model


def _line(row: Row) -> str:
    errors = "  ".join(f"{column} {100 * getattr(row, column):3.0f}" for column in COLUMNS)
    return (
        f"{row.model:10} batch {row.batch:3}  {row.stages} stages {row.measured_ms:8.2f} ms"
        f"  {errors}  step {100 * row.step:+4.0f} %"
    )


if __name__ == "__main__":
    main()
