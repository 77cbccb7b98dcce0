"""The graphs of a stage that is run segment by segment."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.cone import Cone, cone
from edgetrain.compiler.jvp import jvp
from edgetrain.compiler.ports import (
    COTANGENT,
    NOISE,
    TANGENT,
    StageGraphs,
    make_port,
    merged,
)
from edgetrain.compiler.rules.base import add_all
from edgetrain.compiler.segments import Layer, Stretch
from edgetrain.compiler.vjp import prepare, vjp
from edgetrain.estimator_spec import JVP, EstimatorSpec
from edgetrain.manifest import Port, Role
from edgetrain.segment import Segment, Unit

# Rectifiers: 0 below, and beyond their bound constant.
_RECTIFIERS: Final = frozenset({"Relu", "Clip"})


@dataclass(frozen=True, slots=True)
class Source:
    """A stage to be divided.

    Attributes:
        builder: knows all primal values and has emitted nothing.
        nodes: in execution order.
        ends: the values whose cotangent the stage gets.
        perturbed: the received values that get noise or bring tangents with them.
        first: number of its first node in the whole model.
        cones: where its layers are felt at its end is wanted.
    """

    builder: GraphBuilder
    nodes: tuple[Node, ...]
    ends: tuple[str, ...]
    perturbed: tuple[str, ...] = ()
    first: int = 0
    cones: bool = True


class SegmentGraphs:
    """Compiles the segments of one stage, in order.

    Args:
        graphs: takes the finished graphs.
        source: the stage.
        spec: how gradients are estimated.
        pushes: noise is pushed through the segments; else they are only contracted.
    """

    def __init__(
        self, graphs: StageGraphs, source: Source, spec: EstimatorSpec, *, pushes: bool
    ) -> None:
        self._graphs = graphs
        self._fresh = source.builder
        self._nodes = source.nodes
        self._ends = source.ends
        self._spec = spec
        self._pushes = pushes
        self._cones = source.cones and len(source.ends) == 1
        self._numbers = {
            name: source.first + index
            for index, node in enumerate(source.nodes)
            for name in node.outputs
        }
        self._active = set(source.perturbed)
        self._segments: list[Segment] = []

    def compile(
        self, stretches: Sequence[Stretch], tail: Collection[str]
    ) -> tuple[Segment, ...]:
        """All segments.

        Args:
            stretches: they cover the nodes.
            tail: weights whose gradient is exact.
        """
        for stretch in stretches:
            exact = any(not x.weights.isdisjoint(tail) for x in stretch.layers)
            number = len(self._segments)
            units = () if exact else tuple(self._unit(x) for x in stretch.layers)
            made = self._read_after(stretch)
            seen = [*made, *(unit.mask for unit in units if unit.mask)]
            names = [f"{number}/push", f"{number}/contract"]
            if not self._push(names[0], stretch, units, made):
                names[0] = ""
            if not self._contract(names[1], stretch, tail if exact else (), seen):
                names[1] = ""
            self._segments.append(Segment(units, made, names[0], names[1], exact))
        return tuple(self._segments)

    def _unit(self, layer: Layer) -> Unit:
        g, node = self._fresh, layer.activation
        mask, bound = "", float("inf")
        if node is not None and node.op_type in _RECTIFIERS:
            mask, bound = _rectified(g, node)
        spread: Cone = ()
        if self._cones:
            spread = cone(g, self._nodes[layer.start :], layer.name, self._ends[0])
        spec = g.spec(layer.name)
        kind = (layer.name, spec.dtype, spec.shape)
        return Unit(*kind, mask, bound, spread, self._numbers[layer.name])

    def _read_after(self, stretch: Stretch) -> tuple[str, ...]:
        """The values made before its end that the nodes after it read."""
        later = {name for node in self._nodes[stretch.stop :] for name in node.reads}
        here = self._nodes[stretch.start : stretch.stop]
        return tuple(name for node in here for name in node.outputs if name in later)

    def _push(
        self, name: str, stretch: Stretch, units: Sequence[Unit], made: Sequence[str]
    ) -> bool:
        g = self._fresh.fork()
        nodes = self._nodes[stretch.start : stretch.stop]
        outputs = [make_port(g, value, Role.ACTIVATION) for value in made]
        outputs += [make_port(g, u.mask, Role.ACTIVATION) for u in units if u.mask]
        noisy = {unit.name for unit in units}
        if not self._pushes:
            return False
        if self._spec.form == JVP:
            outputs += self._push_tangents(g, nodes, noisy, made)
        else:
            outputs += self._push_values(g, nodes, noisy)
        self._graphs.add(g, name, merged(outputs), g.nodes)
        return bool(outputs)

    def _push_tangents(
        self, g: GraphBuilder, nodes: Sequence[Node], noisy: set[str], made: Sequence[str]
    ) -> list[Port]:
        """The values themselves, and beside them tangents, with noise added to some."""
        nodes = prepare(g, nodes)
        for node in nodes:
            g.append(node)
        read = {name for node in nodes for name in node.reads}
        known: dict[str, str] = {}
        for name in sorted(self._active & read):
            known[name] = _described(g, TANGENT, name)
        for node in nodes:
            known = jvp(g, [node], known)
            for name in noisy.intersection(node.outputs):
                noise = _described(g, NOISE, name)
                known[name] = add_all(g, known.get(name), noise) or noise
        own = {name for node in nodes for name in node.outputs} & known.keys()
        self._active |= own
        return [
            # an input of the graph cannot be its output
            Port(
                g("Identity", known[name]), Role.TANGENT, name, g.dtype(name), g.shape(name)
            )
            for name in dict.fromkeys((*made, *self._ends))
            if name in own
        ]

    def _push_values(
        self, g: GraphBuilder, nodes: Sequence[Node], noisy: set[str]
    ) -> list[Port]:
        """The stage's own nodes, with noise added to what some of them make."""
        for node in nodes:
            still = {name: f"{name}/still" for name in noisy.intersection(node.outputs)}
            outputs = tuple(still.get(name, name) for name in node.outputs)
            g.append(replace(node, outputs=outputs))
            for name, before in still.items():
                noise = _described(g, NOISE, name)
                g.append(Node("Add", f"{name}/moved", (before, noise), (name,)))
        own = {name for node in nodes for name in node.outputs}
        return [make_port(g, n, Role.ACTIVATION) for n in self._ends if n in own]

    def _contract(
        self, name: str, stretch: Stretch, tail: Collection[str], made: Sequence[str]
    ) -> bool:
        """Values and gradients, from the cotangents of the units or of the ends."""
        g = self._fresh.fork()
        g.lean = True
        nodes = prepare(g, self._nodes[stretch.start : stretch.stop])
        for node in nodes:
            g.append(node)
        outputs = [make_port(g, value, Role.ACTIVATION) for value in made]
        terms: dict[str, list[str]] = {}
        for seeds, weights in self._seeded(g, stretch, tail):
            for weight, gradient in vjp(g, nodes, seeds, weights).items():
                terms.setdefault(weight, []).append(gradient)
        for weight, parts in terms.items():
            total = g("Identity", add_all(g, *parts) or "")
            kind = g.dtype(weight), g.shape(weight)
            outputs.append(Port(total, Role.GRADIENT, weight, *kind))
        self._graphs.add(g, name, merged(outputs), g.nodes)
        return bool(outputs)

    def _seeded(
        self,
        g: GraphBuilder,
        stretch: Stretch,
        tail: Collection[str],
    ) -> Iterator[tuple[Mapping[str, str], list[str]]]:
        """Where cotangents come in, and the weights that learn from them."""
        if tail:
            seeds = {name: _described(g, COTANGENT, name) for name in self._ends}
            yield seeds, sorted(tail)
            return
        for layer in stretch.layers:
            seed, node = _described(g, COTANGENT, layer.name), layer.activation
            if node is not None and node.op_type in _RECTIFIERS:
                # nothing reaches the unit where its rectifier is at a bound
                seed = vjp(g, [node], {node.output: seed}, [layer.name])[layer.name]
            yield {layer.name: seed}, sorted(layer.weights)


def _described(g: GraphBuilder, prefix: str, name: str) -> str:
    """An input of the type and shape of the value it belongs to."""
    g.describe(prefix + name, g.dtype(name), g.shape(name))
    return prefix + name


def _rectified(g: GraphBuilder, node: Node) -> tuple[str, float]:
    """The rectifier's value and its upper bound; no name if it is none."""
    if node.op_type == "Relu":
        return node.output, float("inf")
    low, high = node.input(1), node.input(2)
    if not (g.is_constant(low) and float(g.value(low)) == 0.0):
        return "", float("inf")
    if high and not g.is_constant(high):
        return "", float("inf")
    return node.output, float(g.value(high)) if high else float("inf")
