"""Slower devices: the same engine, held back to a share of its speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from edgetrain.manifest import GraphSpec
from edgetrain.runtime.engines.base import Array, Engine, LoadedGraph, Measuring, Seen


class SlowedEngine:
    """An engine whose every run takes `1 / speed` times as long.

    Args:
        engine: does the work.
        speed: share of its speed, above 0, at most 1.
        sleep: waits so many seconds.
    """

    def __init__(
        self, engine: Engine, speed: float, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.name = engine.name
        self._engine = engine
        self._speed = speed
        self._sleep = sleep

    def load(
        self, graph: bytes, spec: GraphSpec, held: Mapping[str, npt.NDArray[np.float32]]
    ) -> LoadedGraph:
        """See `Engine.load`."""
        return _SlowedGraph(self._engine.load(graph, spec, held), self._speed, self._sleep)

    def measure(self, graph: bytes, spec: GraphSpec) -> Seen | None:
        """See `Measuring.measure`."""
        engine = self._engine
        return engine.measure(graph, spec) if isinstance(engine, Measuring) else None


class _SlowedGraph:
    def __init__(
        self, graph: LoadedGraph, speed: float, sleep: Callable[[float], None]
    ) -> None:
        self._graph = graph
        self._speed = speed
        self._sleep = sleep

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        start = time.perf_counter()
        results = self._graph.run(feeds)
        self._sleep((time.perf_counter() - start) * (1 / self._speed - 1))
        return results

    def holding(self, held: Mapping[str, npt.NDArray[np.float32]]) -> LoadedGraph:
        return _SlowedGraph(self._graph.holding(held), self._speed, self._sleep)
