"""The finished graphs of one stage, and what each of their inputs and outputs is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from edgetrain.bundle import sha256
from edgetrain.compiler.build import GraphBuilder, Node, live_nodes
from edgetrain.compiler.live_bytes import peak_bytes
from edgetrain.compiler.loss import LABELS, Criterion
from edgetrain.compiler.part import Part
from edgetrain.manifest import GraphName, GraphSpec, Port, Role
from edgetrain.tensors import TensorSpec

COTANGENT: Final = "cotangent/"
TANGENT: Final = "tangent/"
NOISE: Final = "noise/"
_PREFIXES: Final = {
    COTANGENT: Role.COTANGENT,
    TANGENT: Role.TANGENT,
    NOISE: Role.NOISE,
}


class StageGraphs:
    """Collects the graphs of one stage.

    Attributes:
        specs: of each graph, by its name.
        data: each graph, serialized.

    Args:
        part: the stage.
        held: the weights that are inputs; all others are constants.
    """

    def __init__(self, part: Part, held: Collection[str]) -> None:
        self.specs: dict[str, GraphSpec] = {}
        self.data: dict[str, bytes] = {}
        self._part = part
        self._held = frozenset(held)
        self._received = frozenset(spec.name for spec in part.receives)

    def add(
        self,
        g: GraphBuilder,
        graph: str,
        outputs: Sequence[Port],
        nodes: Sequence[Node],
    ) -> tuple[Port, ...]:
        """Add a graph unless it would give nothing.

        Args:
            g: where the nodes were emitted.
            graph: its name.
            outputs: what it gives, no value twice.
            nodes: where to look for what `outputs` depend on.

        Returns:
            The stash it takes.
        """
        if not outputs:
            return ()
        live = live_nodes(nodes, {port.name for port in outputs})
        made = {name for node in live for name in node.outputs}
        read = dict.fromkeys(name for node in live for name in node.reads)
        outer = [name for name in read if name not in made and not g.is_constant(name)]
        inputs = tuple(self._input_port(g, name) for name in outer)
        model = g.model(
            _specs(inputs), _specs(outputs), f"stage{self._part.stage}/{graph}", live
        )
        data = model.SerializeToString()
        self.data[graph] = data
        peak = peak_bytes(g, live, outputs)
        self.specs[graph] = GraphSpec(inputs, tuple(outputs), sha256(data), peak)
        return tuple(port for port in inputs if port.role is Role.STASH)

    def reads(self, graph: str, name: str) -> bool:
        """Whether a graph was added that takes the value."""
        spec = self.specs.get(graph)
        return spec is not None and any(port.name == name for port in spec.inputs)

    def _input_port(self, g: GraphBuilder, name: str) -> Port:
        if name == LABELS:
            return make_port(g, name, Role.LABELS)
        for prefix, role in _PREFIXES.items():
            if name.startswith(prefix):
                key = name.removeprefix(prefix)
                return Port(name, role, key, g.dtype(name), g.shape(name))
        if name in self._held:
            return make_port(g, name, Role.WEIGHT)
        if name in self._received:
            return make_port(g, name, Role.ACTIVATION)
        return make_port(g, name, Role.STASH)


def make_port(g: GraphBuilder, name: str, role: Role) -> Port:
    """The port of a value that stands for itself."""
    return Port(name, role, name, g.dtype(name), g.shape(name))


def add_seeds(g: GraphBuilder, names: Iterable[str]) -> dict[str, str]:
    """An input for the cotangent of each of the values."""
    seeds = {name: COTANGENT + name for name in names}
    for name, seed in seeds.items():
        g.describe(seed, g.dtype(name), g.shape(name))
    return seeds


def add_criterion(graphs: StageGraphs, g: GraphBuilder, criterion: Criterion) -> None:
    """Add the graph ``criterion``: the loss and its cotangent, apart from the stage."""
    kind = (g.dtype(criterion.target), g.shape(criterion.target))
    ports = [
        make_port(g, criterion.loss, Role.LOSS),
        Port(criterion.cotangent, Role.COTANGENT, criterion.target, *kind),
    ]
    graphs.add(g, GraphName.CRITERION, ports, g.nodes)


def merged(*groups: Iterable[Port]) -> list[Port]:
    """All ports in order; a name that comes again is left out."""
    ports: dict[str, Port] = {}
    for group in groups:
        for port in group:
            ports.setdefault(port.name, port)
    return list(ports.values())


def result_ports(
    g: GraphBuilder,
    found: Mapping[str, str],
    upstream: Collection[str],
    seeds: Collection[str],
) -> list[Port]:
    """Ports for gradients and upstream cotangents.

    A cotangent that merely passes through the stage is not the graph's business: the
    device hands it on. Every other one gets a name of its own.

    Args:
        g: where an Identity is emitted for a value that stands for two.
        found: primal value to the name of its cotangent.
        upstream: those of them that are received activations; the others are weights.
        seeds: the graph's own inputs, which cannot be its outputs.
    """
    ports: list[Port] = []
    taken = set(seeds)
    for key, name in found.items():
        role = Role.COTANGENT if key in upstream else Role.GRADIENT
        if role is Role.COTANGENT and name == COTANGENT + key:
            continue
        own = g("Identity", name) if name in taken else name
        taken.add(own)
        ports.append(Port(own, role, key, g.dtype(key), g.shape(key)))
    return ports


def _specs(ports: Iterable[Port]) -> list[TensorSpec]:
    return [TensorSpec(port.name, port.dtype, port.shape) for port in ports]
