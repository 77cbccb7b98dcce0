"""How much activation memory a stage takes, counted by its tensors."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from edgetrain.bundle import Bundle
from edgetrain.manifest import FAST, GraphName, GraphSpec, Role
from edgetrain.runtime.activation_forecast import work_bytes
from edgetrain.runtime.engines.base import Array, Engine, LoadedGraph, Measuring


class Meter:
    """Counts activations: whatever goes in and out of graphs, for as long as it is kept.

    It needs little cooperation, as it is told when arrays are gone: those stashed,
    received, waiting to be sent or held between two graphs. Arrays that share memory count
    once. What never enters a graph, such as noise that is kept, must be noted; what numpy
    needs for a moment is not counted. Weights and gradients are not activations.

    Costs O(1) an array noted, whatever else is held.
    """

    def __init__(self) -> None:
        self._noted: dict[int, _Held] = {}
        self._held_bytes = 0
        # Arrays may end in any thread, even between two steps of an addition here.
        self._gone: deque[_Held] = deque()
        self._peak_bytes = 0

    def note(self, arrays: Iterable[Array], work_bytes: int = 0) -> None:
        """Count arrays from now on, until they are gone.

        Args:
            arrays: also such as are noted already.
            work_bytes: needed at this moment, beside what is noted.
        """
        noted, gone = self._noted, self._gone
        for array in arrays:
            # By now the death of an earlier array at this address is told.
            if gone:
                self._forget_gone()
            if id(array) in noted:
                continue
            owner = array if array.base is None else _owner(array)
            key = id(owner)
            if key not in noted:
                noted[key] = held = _Held(owner, gone.append)
                held.key, held.nbytes = key, owner.nbytes
                self._held_bytes += held.nbytes
        self.work(work_bytes)

    def work(self, nbytes: int) -> None:
        """So much is needed at this moment, beside what was noted."""
        most = self.live_bytes + nbytes
        if most > self._peak_bytes:
            self._peak_bytes = most

    @property
    def live_bytes(self) -> int:
        """What was noted and is still there."""
        if self._gone:
            self._forget_gone()
        return self._held_bytes

    def take_peak(self) -> int:
        """The most at once since this was asked last."""
        peak_bytes, self._peak_bytes = self._peak_bytes, 0
        return peak_bytes

    def _forget_gone(self) -> None:
        while self._gone:
            held = self._gone.popleft()
            del self._noted[held.key]
            self._held_bytes -= held.nbytes


class _Held(weakref.ref[Array]):
    """An array that is noted, and what is left to know of it when it is gone."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class MeteredEngine:
    """An engine whose graphs are counted as they run.

    Args:
        engine: does the work.
        meter: is told.
    """

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self.name = engine.name
        self._engine = engine
        self._meter = meter

    def load(
        self, graph: bytes, spec: GraphSpec, held: Mapping[str, npt.NDArray[np.float32]]
    ) -> LoadedGraph:
        """See `Engine.load`."""
        return _MeteredGraph(self._engine.load(graph, spec, held), spec, self._meter)

    def note(self, arrays: Iterable[Array]) -> None:
        """See `Counting.note`."""
        self._meter.note(arrays)


class _MeteredGraph:
    def __init__(self, graph: LoadedGraph, spec: GraphSpec, meter: Meter) -> None:
        self._graph = graph
        self._spec = spec
        self._meter = meter
        roles = (Role.WEIGHT, Role.GRADIENT)
        self._apart = {port.name for role in roles for port in spec.ports(role)}
        self._work_bytes = work_bytes(spec)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        apart = self._apart
        fed = [a for name, a in feeds.items() if name not in apart]
        self._meter.note(fed, self._work_bytes)
        results = self._graph.run(feeds)
        self._meter.note([a for name, a in results.items() if name not in apart])
        return results

    def holding(self, held: Mapping[str, npt.NDArray[np.float32]]) -> LoadedGraph:
        return _MeteredGraph(self._graph.holding(held), self._spec, self._meter)


def measured(bundle: Bundle, engine: Engine) -> Bundle:
    """The bundle with each `GraphSpec.peak_bytes` as the engine shows it, where it can.

    Each graph that trains is loaded and run once, by itself.
    """
    if not isinstance(engine, Measuring):
        return bundle
    manifest = bundle.manifest
    specs = dict(manifest.all_graphs)
    for name, spec in specs.items():
        if name.removeprefix(FAST) != GraphName.EVALUATE:
            seen = engine.measure(bundle.graphs[name], spec)
            if seen is not None:
                specs[name] = msgspec.structs.replace(spec, peak_bytes=seen.tensor_bytes)
    fast = manifest.fast
    if fast is not None:
        graphs = {name: specs[FAST + name] for name in fast.graphs}
        fast = msgspec.structs.replace(fast, graphs=graphs)
    graphs = {name: specs[name] for name in manifest.graphs}
    return replace(
        bundle, manifest=msgspec.structs.replace(manifest, graphs=graphs, fast=fast)
    )


def _owner(array: Array) -> Array:
    """The array that a mere reshape looks at; else the array itself."""
    while isinstance(array.base, np.ndarray) and array.base.nbytes == array.nbytes:
        array = array.base
    return array
