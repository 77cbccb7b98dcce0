"""Lesser devices: the same engine, held back in what it runs and how fast."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from edgetrain.abilities import BACKWARD, JVP, WEIGHTS
from edgetrain.errors import EngineError
from edgetrain.manifest import GraphSpec, Role
from edgetrain.runtime.engines.base import Array, Engine, LoadedGraph, Measuring, Seen

MAX_OVERSHOOT_S: Final = 1e-3  # more is not the timer but the machine, which is busy

_NAMED: Final = re.compile(rb"stage[0-9]+/(backward|loss)")


class SlowedEngine:
    """An engine whose every run takes longer: `1 / speed` times, or as long as is said.

    Args:
        engine: does the work.
        speed: asked after each run: share of its speed, above 0, at most 1.
        paced: seconds that a forward and a backward take at full speed, whatever the
            engine takes; a loss graph, which does both, takes their sum. None: what the
            engine takes.
        clock: seconds, monotonic.
        work_clock: seconds of work; by default `clock`. Where runs compute on the calling
            thread alone, that thread's processor time: then what a run waits for a
            processor, which others of this machine's devices have, is not slowed too.
        sleep: waits so many seconds.
    """

    def __init__(  # noqa: PLR0913  two clocks, each with a default
        self,
        engine: Engine,
        speed: Callable[[], float],
        *,
        paced: tuple[float, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        work_clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = engine.name
        self._engine = engine
        self._paced = paced
        self._pace = _Pace(speed, clock, work_clock or clock, sleep)

    def load(
        self, graph: bytes, spec: GraphSpec, held: Mapping[str, npt.NDArray[np.float32]]
    ) -> LoadedGraph:
        """See `Engine.load`."""
        seconds = None if self._paced is None else _paced_s(spec, *self._paced)
        return _SlowedGraph(self._engine.load(graph, spec, held), self._pace, seconds)

    def measure(self, graph: bytes, spec: GraphSpec) -> Seen | None:
        """See `Measuring.measure`."""
        engine = self._engine
        return engine.measure(graph, spec) if isinstance(engine, Measuring) else None


class _Pace:
    """Makes runs last as long as they should, on average.

    What one sleep overshoots, the next is shorter by.
    """

    def __init__(
        self,
        speed: Callable[[], float],
        clock: Callable[[], float],
        work_clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._clock = clock
        self._work_clock = work_clock
        self._speed = speed
        self._sleep = sleep
        self._overshot_s = 0.0

    def begin(self) -> tuple[float, float]:
        """When a run begins, by either clock."""
        return self._clock(), self._work_clock()

    def hold(self, began: tuple[float, float], seconds: float | None) -> None:
        """Wait until a run has taken its time.

        Args:
            began: see `begin`.
            seconds: it takes at full speed; None: as long as it worked.
        """
        start_s, worked_s = began
        taken_s = self._work_clock() - worked_s if seconds is None else seconds
        end_s = start_s + taken_s / self._speed() - self._overshot_s
        rest_s = end_s - self._clock()
        if rest_s > 0:
            self._sleep(rest_s)
            late_s = self._clock() - end_s
            self._overshot_s = min(max(late_s, 0.0), MAX_OVERSHOOT_S)


class _SlowedGraph:
    def __init__(self, graph: LoadedGraph, pace: _Pace, seconds: float | None) -> None:
        self._graph = graph
        self._pace = pace
        self._seconds = seconds

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        began = self._pace.begin()
        results = self._graph.run(feeds)
        self._pace.hold(began, self._seconds)
        return results

    def holding(self, held: Mapping[str, npt.NDArray[np.float32]]) -> LoadedGraph:
        return _SlowedGraph(self._graph.holding(held), self._pace, self._seconds)


def _paced_s(spec: GraphSpec, forward_s: float, backward_s: float) -> float:
    """How long a graph takes.

    It goes backward if gradients or cotangents come out or go in, and forward as well if
    a loss comes out too.
    """
    given = {port.role for port in spec.outputs}
    taken = {port.role for port in spec.inputs}
    if not {Role.GRADIENT, Role.COTANGENT} & (given | taken):
        return forward_s
    return backward_s + (forward_s if Role.LOSS in given else 0.0)


class NarrowedEngine:
    """An engine that refuses some graphs, as the compilers of accelerators do.

    Args:
        engine: runs the others.
        runs: of `ABILITIES`, those it keeps.
    """

    def __init__(self, engine: Engine, runs: Collection[str]) -> None:
        self.name = engine.name
        self._engine = engine
        self._runs = frozenset(runs)

    def load(
        self, graph: bytes, spec: GraphSpec, held: Mapping[str, npt.NDArray[np.float32]]
    ) -> LoadedGraph:
        """See `Engine.load`."""
        lacking = _needs(graph, spec) - self._runs
        if lacking:
            raise EngineError(f"this engine runs no {', '.join(sorted(lacking))} graphs")
        return self._engine.load(graph, spec, held)

    def measure(self, graph: bytes, spec: GraphSpec) -> Seen | None:
        """See `Measuring.measure`."""
        engine = self._engine
        return engine.measure(graph, spec) if isinstance(engine, Measuring) else None


def _needs(graph: bytes, spec: GraphSpec) -> frozenset[str]:
    """The abilities that a graph takes.

    The contraction of a layer with a cotangent, and the cotangent of a loss at what it
    applies to, are plain forwards: a backward brings a cotangent further up, or is named
    one where it ends at weights.
    """
    taken = {port.role for port in spec.inputs}
    given = {port.role for port in spec.outputs}
    own = {port.key for port in spec.inputs if port.role is Role.STASH}
    further = any(p.role is Role.COTANGENT and p.key not in own for p in spec.outputs)
    named = Role.GRADIENT in given and _NAMED.search(graph) is not None
    found = {
        BACKWARD: further or named,
        JVP: Role.TANGENT in taken | given,
        WEIGHTS: Role.WEIGHT in taken,
    }
    return frozenset(word for word, needed in found.items() if needed)
