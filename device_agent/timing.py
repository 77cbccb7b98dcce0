"""Times the cases of a probe: stages of one op group each, run as in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from device_agent.probe_set import ProbeCase, ProbeSet
from edgetrain.bundle import Bundle
from edgetrain.device_profile import Case
from edgetrain.manifest import GraphName
from edgetrain.op_groups import OpGroup, update_amount
from edgetrain.optimizer_spec import LRSpec, OptimizerSpec
from edgetrain.runtime.choice import choose
from edgetrain.runtime.engines.onnxruntime import OnnxRuntimeEngine
from edgetrain.runtime.estimators.base import Tick
from edgetrain.runtime.optim.table import make
from edgetrain.runtime.parameters import Parameters
from edgetrain.runtime.stage import Stage
from edgetrain.tensors import TensorSpec

Clock = Callable[[], float]

LEAST: Final = 5  # passes of a case, however long they take
MOST: Final = 200
PATIENCE: Final = 4  # times as long as asked for, where other programs are in the way
NEAR: Final = 1.2  # of the shortest
OPTIMIZER: Final = OptimizerSpec("sgd", LRSpec(0.01))
UPDATES: Final[Mapping[str, OptimizerSpec]] = {
    "sgd": OPTIMIZER,
    "momentum": OptimizerSpec("sgd", LRSpec(0.01), momentum=0.9),
    "adam": OptimizerSpec("adam", LRSpec(0.01)),
}
UPDATE_ELEMENTS: Final = (20_000, 200_000, 1_000_000)


class TimedStage:
    """One case, loaded on its best path, ready to be run and timed.

    Args:
        bundle: a middle stage.
        engine: what runs it.
        clock: seconds, monotonic.
    """

    def __init__(self, bundle: Bundle, engine: OnnxRuntimeEngine, clock: Clock) -> None:
        def load(bundle: Bundle) -> Stage:
            return Stage(bundle, engine, OPTIMIZER, microbatches=1, seed=0)

        self._clock = clock
        self._stage, _ = choose(bundle, engine.block, load)
        manifest = self._stage.manifest
        back = [spec for spec in manifest.sends if spec.name in manifest.cotangents_in]
        self._received = _drawn(manifest.receives)
        self._arriving = _drawn(tuple(back))

    def run(self) -> tuple[float, float]:
        """Seconds of one forward and of one backward."""
        tick = Tick(0, 0)
        start = self._clock()
        self._stage.forward(tick, self._received)
        middle = self._clock()
        self._stage.backward(tick, self._arriving)
        return middle - start, self._clock() - middle


def time_case(
    probes: ProbeSet,
    case: ProbeCase,
    engine: OnnxRuntimeEngine,
    *,
    clock: Clock,
    for_s: float,
) -> Case:
    """Measure one case: what fits in `for_s`, and five passes at least."""
    stage = TimedStage(probes.bundle(case, engine.block), engine, clock)
    pairs = repeat(stage.run, clock, for_s)
    forward_s, backward_s = map(typical, zip(*pairs, strict=True))
    amount = case.amount
    work = (amount.flop, amount.nbytes, amount.nodes)
    return Case(case.name, case.group, case.batch, *work, forward_s, backward_s)


def time_updates(*, clock: Clock, for_s: float) -> list[Case]:
    """Measure the update of weights, by optimizer and size."""
    cases = []
    for name, spec in UPDATES.items():
        for elements in UPDATE_ELEMENTS:
            weights, before = np.zeros((2, elements), np.float32)
            gradient = np.full(elements, 1e-3, np.float32)
            optimizer = make(spec, elements)

            def update() -> tuple[float]:
                start = clock()
                optimizer.step(weights, gradient, 0.01, before)  # noqa: B023  called here
                return (clock() - start,)

            seconds = typical([s for (s,) in repeat(update, clock, for_s)])
            amount = update_amount(name, elements)
            work = (amount.flop, amount.nbytes, amount.nodes)
            label = f"{name} {elements}"
            cases.append(Case(label, OpGroup.OPTIMIZER, 1, *work, seconds, 0.0))
    return cases


def weights_as_inputs(
    probes: ProbeSet,
    case: ProbeCase,
    engine: OnnxRuntimeEngine,
    *,
    clock: Clock,
    for_s: float,
) -> float:
    """How many times as long a forward takes whose weights are inputs, not constants.

    Both in turn, as deployed: portable graphs without a stash.
    """
    if case.constant is None:
        raise ValueError(f"case {case.name!r} has no graph of constant weights")
    bundle = probes.bundle(case, 0)
    spec = bundle.manifest.graphs[GraphName.EVALUATE]
    held = Parameters(bundle).held(spec)
    graphs = (
        engine.load(bundle.graphs[GraphName.EVALUATE], spec, held),
        engine.load(probes.graphs[case.constant.sha256], case.constant, {}),
    )
    values = _drawn(bundle.manifest.receives)

    def both() -> tuple[float, float]:
        marks = [clock()]
        for graph in graphs:
            graph.run(values)
            marks.append(clock())
        return marks[1] - marks[0], marks[2] - marks[1]

    both()
    pairs = repeat(both, clock, for_s)
    inputs_s, constants_s = map(typical, zip(*pairs, strict=True))
    return inputs_s / constants_s


def typical(times: Sequence[float]) -> float:
    """The lower quartile: what the device does when nothing else is in the way."""
    return sorted(times)[len(times) // 4]


def repeat(
    run: Callable[[], tuple[float, ...]], clock: Clock, for_s: float
) -> list[tuple[float, ...]]:
    """Times of run after run, for so long; for longer while they do not agree.

    They do when a quarter of them is near the shortest: else other programs are in the way.
    """
    start = clock()
    results: list[tuple[float, ...]] = []
    while len(results) < MOST:
        spent_s = clock() - start
        if len(results) >= LEAST and (
            spent_s >= PATIENCE * for_s or (spent_s >= for_s and _agree(results))
        ):
            break
        results.append(run())
    return results


def _agree(results: Sequence[tuple[float, ...]]) -> bool:
    return all(typical(t) <= NEAR * min(t) for t in zip(*results, strict=True))


def _drawn(specs: tuple[TensorSpec, ...]) -> dict[str, npt.NDArray[Any]]:
    generator = np.random.Generator(np.random.Philox(1))
    return {s.name: generator.standard_normal(s.shape, np.float32) for s in specs}
