"""What a stage's forward keeps for its backward: as few bytes as pays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from onnx import helper, numpy_helper

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.minimum_cut import source_side
from edgetrain.compiler.origin import origins, prepares
from edgetrain.compiler.program import OPSET
from edgetrain.compiler.rules.normalization import channel_affine
from edgetrain.compiler.shapes import infer, known
from edgetrain.compiler.values import value_info

# They only say how the same elements are to be read.
VIEWS: Final = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
# One pass over memory gives the same bits again. Products, convolutions, recurrences,
# pooling, reductions and whatever has statistics are not among them.
CHEAP: Final = VIEWS | {
    "Abs", "Add", "And", "Cast", "Celu", "Clip", "Concat", "Cos", "DepthToSpace", "Div",
    "Elu", "Equal", "Erf", "Exp", "Expand", "Gather", "Gelu", "Greater", "GreaterOrEqual",
    "HardSigmoid", "HardSwish", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean",
    "Min", "Mish", "Mul", "Neg", "Not", "Or", "PRelu", "Pad", "Pow", "Reciprocal", "Relu",
    "Selu", "Sigmoid", "Sign", "Sin", "Slice", "Softplus", "Softsign", "SpaceToDepth",
    "Split", "Sqrt", "Sub", "Sum", "Tanh", "Tile", "Transpose", "Trilu", "Where",
}  # fmt: skip
# A byte computed again costs as much as so many bytes that are stashed: without a price,
# chains of nodes would be run again to spare next to nothing.
PRICE: Final = 1 / 8


class Keep(StrEnum):
    """What `forward` hands to `backward`.

    ALL: every value that the backward reads.
    LEAST: the fewest bytes from which cheap nodes give these values again.
    INPUTS: what the stage received, and the statistics of its microbatch; backward runs
        the forward again.
    """

    ALL = "all"
    LEAST = "least"
    INPUTS = "inputs"


@dataclass(frozen=True, slots=True)
class Halves:
    """The nodes of a differentiated stage, before they become two graphs.

    Attributes:
        forward, backward: in execution order; a node may be in both.
    """

    forward: list[Node]
    backward: list[Node]


def divide(
    g: GraphBuilder,
    halves: Halves,
    seeds: Collection[str],
    held: Collection[str],
    keep: Keep,
) -> Halves:
    """Choose what the stage stashes, and make its backward compute the rest again.

    With `Keep.LEAST` by a minimum cut: every value is either stashed, which costs its
    bytes, or computed again from values that are themselves stashed or computed again,
    which costs `PRICE` bytes a byte. Weights and constants cost nothing, as the backward
    has them anyhow; so the product of weights alone is computed again, though it is no
    pass over memory. Nodes of the backward that read no cotangent, such as masks, may run
    on either side: a mask of booleans takes a quarter of the values it was made of. The
    statistics of BatchNormalization are never computed a second time. All this changes no
    number, as the same kernels run on the same values.

    Args:
        g: knows every forward value; learns the shapes of those of the backward that
            depend on no cotangent.
        halves: the nodes as they were emitted, those of the backward all needed.
        seeds: the cotangents that come in.
        held: the weights.
        keep: what to stash.

    Source: Chen et al., arXiv 1604.06174, for computing again; the minimum cut is that of
    PyTorch's AOTAutograd. There all but a few kinds of nodes may be run again, as a GPU has
    arithmetic to spare; here only passes over memory.
    """
    if keep is Keep.ALL:
        return halves
    early, late = _parted(halves.backward, seeds)
    again = Recomputation(g, {*held, *seeds})
    again.add_forward(halves.forward, CHEAP if keep is Keep.LEAST else None)
    needed = again.sources(late)
    if keep is Keep.INPUTS:
        again.add_early(early)
        return Halves(halves.forward, [*again.nodes(needed, ()), *late])
    _learn_shapes(g, early)
    again.add_early(early)
    kept, _ = again.cheapest(needed)
    forward = [*halves.forward, *early]
    return Halves(forward, [*again.nodes(needed - kept, kept), *late])


@dataclass(frozen=True, slots=True)
class _Maker:
    """What gives a value again, and at what price for each of its bytes."""

    nodes: tuple[Node, ...]
    price: float


class Recomputation:
    """What can be computed again, in the order of the forward.

    Args:
        g: where the nodes were emitted.
        free: names that the backward has anyhow, apart from constants.
    """

    def __init__(self, g: GraphBuilder, free: Collection[str]) -> None:
        self._g = g
        self._free = free
        self._makers: dict[str, _Maker] = {}

    def add_forward(self, nodes: Iterable[Node], chosen: Collection[str] | None) -> None:
        """Nodes of the forward: those of the chosen kinds; None: all.

        With the chosen kinds go products of weights.
        """
        nodes = list(nodes)
        read = {name for node in nodes for name in node.reads}
        made_of = origins(nodes, self._free, set(filter(self._g.is_constant, read)))
        for node in nodes:
            product = node.op_type == "MatMul" and prepares(node, made_of)
            if node.op_type == "BatchNormalization":
                applied = _applied(self._g, node)
                self._makers[node.output] = _Maker(applied, PRICE)
            elif chosen is None or product or (node.op_type in chosen and not node.domain):
                price = 0 if node.op_type in VIEWS else PRICE
                self._add(node, price)

    def add_early(self, nodes: Iterable[Node]) -> None:
        """Nodes of the backward that run once in any case, on one side or the other."""
        for node in nodes:
            self._add(node, 0)

    def sources(self, nodes: Iterable[Node]) -> frozenset[str]:
        """What nodes read that they do not make, and that is not to be had for nothing."""
        nodes = list(nodes)
        made = {name for node in nodes for name in node.outputs}
        return frozenset(
            name
            for node in nodes
            for name in node.reads
            if name not in made and name not in self._free and not self._g.is_constant(name)
        )

    def cheapest(self, needed: Collection[str]) -> tuple[frozenset[str], int]:
        """The values to stash so that all `needed` ones can be had, and what that costs.

        In the network whose minimum cut is sought each value has a place before and one
        after it: what lies before the cut is there already, and what is cut is stashed.

        Returns:
            The values, and their bytes with the price of all that is computed again.
        """
        sizes = self._sizes(needed)
        endless = 1 + 2 * sum(size for size in sizes.values() if size is not None)
        edges: dict[tuple[str, str], int] = {}
        for name, size in sizes.items():
            edges[f"<{name}", f">{name}"] = endless if size is None else size
            if name in needed:
                edges[f">{name}", "sink"] = endless
            maker = self._makers.get(name)
            if maker is None:
                edges["source", f"<{name}"] = endless
                continue
            edges["source", f"<{name}"] = int(maker.price * (size or 0))
            for source in self.sources(maker.nodes):
                edges[f">{source}", f"<{name}"] = endless
        side = source_side(edges, "source", "sink")
        kept = frozenset(n for n in sizes if f"<{n}" in side and f">{n}" not in side)
        crossing = (c for (a, b), c in edges.items() if a in side and b not in side)
        return kept, sum(crossing)

    def origins(self, needed: Iterable[str]) -> frozenset[str]:
        """The values that are left to stash if whatever can be is computed again."""
        return frozenset(self._sizes(needed).keys() - self._makers.keys())

    def nodes(self, missing: Collection[str], kept: Collection[str]) -> list[Node]:
        """What makes the missing values of what was kept, in execution order."""
        wanted = set(missing)
        parts: list[tuple[Node, ...]] = []
        for name, maker in reversed(self._makers.items()):
            if name in wanted and maker.nodes not in parts[-1:]:
                parts.append(maker.nodes)
                wanted.update(self.sources(maker.nodes).difference(kept))
        return [node for part in reversed(parts) for node in part]

    def _add(self, node: Node, price: float) -> None:
        self._makers |= dict.fromkeys(filter(None, node.outputs), _Maker((node,), price))

    def _sizes(self, needed: Iterable[str]) -> dict[str, int | None]:
        """Bytes of all values that may play a part; None: it cannot be stashed."""
        sizes: dict[str, int | None] = {}
        open_names = sorted(needed)
        while open_names:
            name = open_names.pop()
            if name in sizes:
                continue
            sizes[name] = self._g.spec(name).nbytes if self._g.knows(name) else None
            if name in self._makers:
                open_names += sorted(self.sources(self._makers[name].nodes))
        return sizes


def _parted(nodes: Iterable[Node], seeds: Collection[str]) -> tuple[list[Node], list[Node]]:
    """Those that depend on no seed, and the others."""
    late = set(seeds)
    parts: tuple[list[Node], list[Node]] = ([], [])
    for node in nodes:
        if not late.isdisjoint(node.reads):
            late.update(node.outputs)
        parts[not late.isdisjoint(node.outputs)].append(node)
    return parts


def _applied(g: GraphBuilder, node: Node) -> tuple[Node, ...]:
    """A BatchNormalization with the statistics that its forward found.

    ONNX Runtime's training kernel takes sqrt(1 / (variance + epsilon)), its inference
    kernel 1 / sqrt(variance + epsilon), which may differ in the last bit. So the factor
    and the offset are computed here, and the inference kernel only applies them. Where a
    kernel is compiled to fuse products and sums, the last bit may still differ.
    """
    if not node.get("training_mode", 0):
        return (node,)
    x, scale, bias = node.inputs[:3]
    mean, variance = node.outputs[1:3]
    inner = g.subgraph()
    epsilon = g.scalar(float(node.get("epsilon", 1e-5)), scale)
    inv_std = inner("Sqrt", inner("Reciprocal", inner("Add", variance, epsilon)))
    factor = inner("Mul", inv_std, scale)
    offset = inner("Sub", bias, inner("Mul", mean, factor))
    channel_affine(inner, x, factor, offset, x)
    *before, last = inner.nodes
    return (*before, replace(last, outputs=(node.output,)))


def _learn_shapes(g: GraphBuilder, nodes: Sequence[Node]) -> None:
    """Describe what nodes make, as far as ONNX's own inference can tell."""
    made = {name for node in nodes for name in node.outputs}
    read = dict.fromkeys(name for node in nodes for name in node.reads if name not in made)
    graph = helper.make_graph(
        [node.to_proto() for node in nodes if not node.domain],
        "early",
        [value_info(g.spec(name)) for name in read if not g.is_constant(name)],
        [],
        [numpy_helper.from_array(g.value(n), n) for n in read if g.is_constant(n)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    for name, spec in known(infer(model)).items():
        if name in made:
            g.describe(name, spec.dtype, spec.shape)
