"""Predicted stage times beside measured ones, before and after learning from one stage.

    python benchmarks/latency_model.py [--models lenet] [--batches 8] [--cpu] [--json F]

Needs the oracle environment (`make oracle`). First the machine is probed as by
`edgetrain-agent probe`, on one thread; with --cpu everything is measured in CPU seconds of
the process, for a machine that has other work too. Each network is cut into stages of about
equal arithmetic, and each is timed, forward and backward, as an agent would run it. The
errors are those of forward + backward, as a share of what was measured; the median and
the largest of a network's stages:

    speed      predicted from one speed of matrix products
    profile    from the profile
    learnt     from the profile, and the time of the stage before (the last, of the first)
    step       of the sum over all stages: by the profile; by all stages but each itself
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

    def error(self, model: LatencyModel) -> float:
        return self.predicted_s(model) / self.seconds - 1


@dataclass(frozen=True, slots=True)
class Row:
    """Errors of one network at one batch size."""

    model: str
    batch: int
    stages: int
    measured_ms: float
    speed: tuple[float, float]
    profile: tuple[float, float]
    learnt: tuple[float, float]
    step_profile: float
    step_learnt: float


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
    for column in ("speed", "profile", "learnt"):
        medians = [getattr(row, column)[0] for row in rows]
        print(f"median of medians, {column}: {100 * statistics.median(medians):.0f} %")
    for column in ("step_profile", "step_learnt"):
        errors = [abs(getattr(row, column)) for row in rows]
        print(f"median error of the sum, {column}: {100 * statistics.median(errors):.0f} %")
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
    taught = [timed[n - 1].teach(start) for n in range(len(timed))]
    most = []
    for left in range(len(timed)):
        model = start
        for n, one in enumerate(timed):
            model = one.teach(model) if n != left else model
        most.append(model)
    total_s = sum(one.seconds for one in timed)
    return Row(
        name,
        batch,
        len(timed),
        1e3 * total_s,
        _spread([one.error(plain) for one in timed]),
        _spread([one.error(start) for one in timed]),
        _spread([one.error(model) for one, model in zip(timed, taught, strict=True)]),
        sum(one.predicted_s(start) for one in timed) / total_s - 1,
        sum(o.predicted_s(m) for o, m in zip(timed, most, strict=True)) / total_s - 1,
    )


def _spread(errors: Sequence[float]) -> tuple[float, float]:
    sizes = [abs(error) for error in errors]
    return statistics.median(sizes), max(sizes)


def _line(row: Row) -> str:
    def text(pair: tuple[float, float]) -> str:
        return f"{100 * pair[0]:4.0f} ({100 * pair[1]:4.0f})"

    return (
        f"{row.model:10} batch {row.batch:3}  {row.stages} stages {row.measured_ms:8.2f} ms"
        f"  speed {text(row.speed)}  profile {text(row.profile)}  learnt {text(row.learnt)}"
        f"  step {100 * row.step_profile:+4.0f} {100 * row.step_learnt:+4.0f} %"
    )


if __name__ == "__main__":
    main()
