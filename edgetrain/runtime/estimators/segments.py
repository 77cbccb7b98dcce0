"""Runs a stage one segment after another, so that little of it is held at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgetrain.bundle import Bundle
from edgetrain.manifest import GraphName, Manifest, Role
from edgetrain.rays import origin
from edgetrain.runtime.engines.base import Array, Counting, Engine, LoadedGraph
from edgetrain.runtime.estimators.base import Arrays
from edgetrain.runtime.parameters import Parameters, Vector
from edgetrain.segment import Unit

Noise = Callable[[Unit], Array]
Seen = Callable[[Unit, Arrays], None]


@dataclass(frozen=True, slots=True)
class Pushed:
    """Where a push ended.

    Attributes:
        values: of the stage's end, as far as its graphs give them.
        tangents: of the same, by the value's name.
    """

    values: Arrays
    tangents: Arrays


class Segments:
    """The segments of one stage, loaded.

    Args:
        bundle: of the stage.
        engine: what runs them.
        parameters: where weights are read and gradients written.
    """

    def __init__(self, bundle: Bundle, engine: Engine, parameters: Parameters) -> None:
        self._engine = engine
        self._specs = bundle.manifest.graphs
        self._segments = bundle.manifest.segments
        self._ends = frozenset(ends_of(bundle.manifest))
        names = {n for s in self._segments for n in (s.push, s.contract) if n}
        self._graphs: dict[str, LoadedGraph] = {
            name: engine.load(
                bundle.graphs[name], self._specs[name], parameters.held(self._specs[name])
            )
            for name in sorted(names)
        }

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units that are perturbed or given a cotangent, in order."""
        return tuple(unit for segment in self._segments for unit in segment.units)

    def note(self, *arrays: Array) -> None:
        """Let what is held beside the segments' own values be counted."""
        if isinstance(self._engine, Counting):
            self._engine.note(arrays)

    def holding(self, parameters: Parameters, weights: Vector) -> Segments:
        """The same graphs on other weights."""
        other = object.__new__(Segments)
        other._engine = self._engine
        other._specs, other._segments = self._specs, self._segments
        other._ends = self._ends
        other._graphs = {
            name: graph.holding(parameters.held(self._specs[name], weights))
            for name, graph in self._graphs.items()
        }
        return other

    def push(
        self,
        values: Arrays,
        noise: Noise,
        tangents: Arrays,
        seen: Seen | None = None,
    ) -> Pushed:
        """Run through all segments with noise at the units.

        Args:
            values: what the stage received.
            noise: for each unit, of its shape.
            tangents: of what it received, where the graphs push tangents.
            seen: is told of each unit, with the values its segment made.
        """
        live, moved = dict(values), dict(tangents)
        for number, segment in enumerate(self._segments):
            spec = self._specs.get(segment.push)
            if spec is None:
                continue
            feeds = dict(live)
            for port in spec.inputs:
                if port.role is Role.TANGENT:
                    feeds[port.name] = moved[port.key]
            feeds |= {f"noise/{unit.name}": noise(unit) for unit in segment.units}
            results = self._graphs[segment.push].run(feeds)
            for port in spec.outputs:
                into = moved if port.role is Role.TANGENT else live
                into[port.key] = results[port.name]
            if seen is not None:
                for unit in segment.units:
                    seen(unit, live)
            self._forget(number, live, moved)
        return Pushed(self._at_the_end(live), self._at_the_end(moved))

    def _at_the_end(self, values: Arrays) -> Arrays:
        return {name: array for name, array in values.items() if name in self._ends}

    def contract(
        self,
        values: Arrays,
        cotangent: Noise,
        ends: Arrays,
        seen: Seen | None = None,
    ) -> None:
        """Run through all segments and write the gradients.

        Args:
            values: what the stage received.
            cotangent: of each unit.
            ends: cotangents of the stage's end, for the exact segment.
            seen: as in `push`.
        """
        live = dict(values)
        for number, segment in enumerate(self._segments):
            spec = self._specs.get(segment.contract)
            if spec is None:
                continue
            feeds = dict(live)
            given = ends if segment.exact else {u.name: cotangent(u) for u in segment.units}
            feeds |= {f"cotangent/{name}": array for name, array in given.items()}
            results = self._graphs[segment.contract].run(feeds)
            live |= {p.key: results[p.name] for p in spec.outputs if p.name in results}
            if seen is not None:
                for unit in segment.units:
                    seen(unit, live)
            self._forget(number, live)

    def _forget(self, number: int, *held: dict[str, Array]) -> None:
        """Drop what no later segment reads and is not the stage's end."""
        later = self._segments[number + 1 :]
        if not later:
            return
        wanted = self._ends | {
            port.key
            for segment in later
            for name in (segment.push, segment.contract)
            if name
            for port in self._specs[name].inputs
        }
        for values in held:
            for name in [n for n in values if n not in wanted]:
                del values[name]


def nothing(unit: Unit) -> Array:
    """No noise, or no cotangent."""
    return np.zeros(unit.shape, unit.dtype)


def masked(unit: Unit, values: Arrays, array: Array) -> Array:
    """What of a unit's noise reaches the stage's end: where its rectifier lets it pass."""
    if not unit.mask:
        return array
    y = values[unit.mask]
    return (
        array * ((y > 0) & (y < unit.bound)) if np.isfinite(unit.bound) else array * (y > 0)
    )


def ends_of(manifest: Manifest) -> tuple[str, ...]:
    """The values whose cotangent a stage is given, its own at a loss, or whose rays."""
    for name in (GraphName.CRITERION, GraphName.HEAD):
        if name in manifest.graphs:
            ports = manifest.graphs[name].ports(Role.COTANGENT)
            return tuple(port.key for port in ports)
    return manifest.cotangents_in or tuple(origin(ray) for ray in manifest.rays.made)
