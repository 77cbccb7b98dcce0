"""Operators that put elements in places: ScatterElements, ScatterND and MaxUnpool.

With "max" and "min", elements that tie share the cotangent evenly. With "none" and an
index given twice the standard leaves open which update wins: every one of them gets the
cotangent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import Cotangents, Tangents, add_all
from edgetrain.compiler.rules.places import flat_rows
from edgetrain.compiler.rules.shaping import Shape, mask, reshape, reshape_from, zeros


@dataclass(frozen=True, slots=True)
class _Scatter:
    """A scatter along one axis: ScatterND is seen as one of rows of a matrix.

    Attributes:
        g: where to emit.
        node: the operator.
        indices: of the updates' shape, along `axis`.
        axis: that is scattered along.
        shape, part: of data and updates, in this view.
    """

    g: GraphBuilder
    node: Node
    indices: str
    axis: int
    shape: Shape
    part: Shape

    @property
    def overwrites(self) -> bool:
        return bool(self.node.get("reduction", "none") == "none")

    def data(self, value: str) -> str:
        return reshape_from(self.g, value, self.g.shape(self.node.output), self.shape)

    def updates(self, value: str) -> str:
        return reshape_from(self.g, value, self.g.shape(self.node.inputs[2]), self.part)

    def leave(self, value: str) -> str:
        """From this view of the data back to the node's."""
        return reshape_from(self.g, value, self.shape, self.g.shape(self.node.output))

    def leave_updates(self, value: str) -> str:
        return reshape_from(self.g, value, self.part, self.g.shape(self.node.inputs[2]))

    def read(self, value: str) -> str:
        """What lies at the places that are written to."""
        return self.g("GatherElements", value, self.indices, axis=self.axis)

    def put(self, base: str, part: str, reduction: str = "none") -> str:
        how = {"axis": self.axis, "reduction": reduction}
        return self.g("ScatterElements", base, self.indices, part, **how)

    def add(self, part: str) -> str:
        """Sum the parts that fall on each place, over zeros."""
        return self.put(zeros(self.g, self.shape, self.node.output), part, "add")


def scatter_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Serves ScatterElements and ScatterND with every reduction."""
    s = _view(g, node)
    dy = s.data(dy)
    if s.overwrites:
        ddata, dupdates = s.put(dy, zeros(g, s.part, node.output)), s.read(dy)
    else:
        by_data, by_updates = _slopes(s)
        ddata, dupdates = _times(g, dy, by_data), _times(g, s.read(dy), by_updates)
    return s.leave(ddata), None, s.leave_updates(dupdates)


def scatter_jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    s = _view(g, node)
    tdata = tangents[0] and s.data(tangents[0])
    tupdates = tangents[2] and s.updates(tangents[2])
    if tdata is None and tupdates is None:
        return None
    if s.overwrites:
        base = tdata or zeros(g, s.shape, node.output)
        return s.leave(s.put(base, tupdates or zeros(g, s.part, node.output)))
    by_data, by_updates = _slopes(s)
    kept = tdata and _times(g, tdata, by_data)
    total = add_all(g, kept, tupdates and s.add(_times(g, tupdates, by_updates)))
    return total and s.leave(total)


def _times(g: GraphBuilder, value: str, factor: str | None) -> str:
    return g("Mul", value, factor) if factor else value


def _view(g: GraphBuilder, node: Node) -> _Scatter:
    data, indices, updates = node.inputs
    shape = g.shape(data)
    if node.op_type == "ScatterElements":
        axis = int(node.get("axis", 0))
        return _Scatter(g, node, indices, axis, shape, g.shape(updates))
    rows = flat_rows(g, indices, shape)
    width = math.prod(shape) // rows.extent
    part = (rows.count, width)
    spread = g("Expand", reshape(g, rows.name, (rows.count, 1)), g.ints(*part))
    return _Scatter(g, node, spread, 0, (rows.extent, width), part)


def _slopes(s: _Scatter) -> tuple[str | None, str | None]:
    """Derivatives of the result by the data and by each update; None is 1."""
    match s.node.get("reduction", "none"):
        case "add":
            return None, None
        case "mul":
            return _product_slopes(s)
        case _:
            return _extremum_slopes(s)


def _product_slopes(s: _Scatter) -> tuple[str, str]:
    """Of data times the updates that fall on it.

    Where an update is zero, the derivative by it is the product of the others; so zeros
    are counted, and left out of the product.
    """
    g, data = s.g, s.data(s.node.inputs[0])
    updates = s.updates(s.node.inputs[2])
    like = s.node.output
    zero = g.scalar(0, like)
    void = mask(g, "Equal", updates, zero, like=like)
    filled = g("Add", updates, void)
    ones = g("Expand", g.scalar(1, like), g.ints(*s.shape))
    product, voids = s.put(ones, filled, "mul"), s.add(void)
    full = mask(g, "Equal", voids, zero, like=like)
    others = g("Sub", s.read(voids), void)
    alone = mask(g, "Equal", others, zero, like=like)
    rest = g("Div", s.read(g("Mul", data, product)), filled)
    return g("Mul", product, full), g("Mul", rest, alone)


def _extremum_slopes(s: _Scatter) -> tuple[str, str]:
    """Of the largest or smallest: where it is attained, 1 over how often."""
    g, like = s.g, s.node.output
    y = s.data(like)
    data = mask(g, "Equal", s.data(s.node.inputs[0]), y, like=like)
    updates = mask(g, "Equal", s.updates(s.node.inputs[2]), s.read(y), like=like)
    share = g("Reciprocal", g("Add", data, s.add(updates)))
    return g("Mul", data, share), g("Mul", updates, s.read(share))


def max_unpool_vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
    """Read dy at the flat indices that x was written to."""
    return (g("Gather", reshape(g, dy, (-1,)), node.inputs[1]),)
