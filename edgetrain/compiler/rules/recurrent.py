"""LSTM, GRU and RNN: what their rules share, from the node's operands and back to them.

The gates are not kept by the forward operator, whose fused kernel is many times as fast as
single nodes. They are evaluated again from the hidden states it yields: two matrix products
over all steps. What remains sequential runs in a Scan node, one a direction.

The derivative is unique but where a gate's activation has a kink, Relu at 0 and
HardSigmoid at its two bounds: there it is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import (
    Cotangents,
    MultiRule,
    Saves,
    Tangents,
    add_all,
)
from edgetrain.compiler.rules.recurrent_cell import (
    Cell,
    Driven,
    Flow,
    Linear,
    Pulled,
    product,
)
from edgetrain.compiler.rules.recurrent_direction import Direction, directions, one, read
from edgetrain.compiler.rules.shaping import reshape, sum_axes


def recurrent_rule(cell: Cell) -> MultiRule:
    """The rule of a recurrent operator.

    Its inputs are x [T, N, I], W [D, G*H, I], R [D, G*H, H], and optionally B [D, 2*G*H],
    sequence_lens, initial_h and initial_c [D, N, H], and P [D, 3*H]; its outputs
    Y [T, D, N, H], Y_h and Y_c [D, N, H]. All of floating type are differentiated.

    Both modes raise UnsupportedOpError for what `recurrent_direction.check` refuses.
    """

    def vjp(g: GraphBuilder, node: Node, dys: Cotangents) -> Cotangents:
        ends = read(g, node, cell.activations)
        lanes = [cell.linearise(g, node, d) for d in ends]
        flows = [_flow(g, node, dys, d) for d in ends]
        pulled = [lane.pull(g, flow) for lane, flow in zip(lanes, flows, strict=True)]
        return _cotangents(g, node, list(zip(ends, lanes, pulled, strict=True)))

    def jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> Tangents:
        ends = read(g, node, cell.activations)
        lanes = [cell.linearise(g, node, d) for d in ends]
        pushed = [
            lane.push(g, _driven(g, node, tangents, d, lane.blocks))
            for d, lane in zip(ends, lanes, strict=True)
        ]
        d = ends[0]
        ys = [reshape(g, p.y, (d.steps, 1, d.batch, d.hidden)) for p in pushed]
        results = (
            _joined(g, ys, axis=1),
            _stacked(g, [p.h for p in pushed]),
            _stacked(g, [p.c for p in pushed]),
        )
        pairs = zip(node.outputs, results, strict=False)
        return tuple(t if name else None for name, t in pairs)

    return MultiRule(vjp, jvp, Saves.INPUTS | Saves.OUTPUT)


def with_hidden_states(g: GraphBuilder, node: Node) -> Node:
    """The node, yielding the hidden states of all steps, which its VJP reads.

    One with the batch first is left alone: it has no rule.

    Args:
        g: learns the shape of the added output.
        node: an LSTM, GRU or RNN.
    """
    if node.output or node.get("layout", 0):
        return node
    x, hidden = node.inputs[0], g.shape(node.inputs[2])[-1]
    steps, batch, _ = g.shape(x)
    name = f"{next(filter(None, node.outputs))}/all_steps"
    g.describe(name, g.dtype(x), (steps, directions(node), batch, hidden))
    return replace(node, outputs=(name, *node.outputs[1:]))


def _flow(g: GraphBuilder, node: Node, dys: Cotangents, d: Direction) -> Flow:
    """The cotangents of what one direction yields."""
    y, h, c = (*dys, None, None)[:3]
    states = (directions(node), d.batch, d.hidden)
    if y:
        own = one(g, y, d.number, (d.steps, *states), axis=1)
        y = reshape(g, own, (d.steps * d.batch, d.hidden))
    return Flow(y, h and one(g, h, d.number, states), c and one(g, c, d.number, states))


def _cotangents(
    g: GraphBuilder, node: Node, pulled: Sequence[tuple[Direction, Linear, Pulled]]
) -> Cotangents:
    """From the directions' cotangents to those of the node's inputs."""
    dxs, dws, drs, dbs = [], [], [], []
    for d, lane, p in pulled:
        dxs.append(g("Gemm", p.inputs, d.w))
        dws.append(g("Gemm", p.inputs, d.x, transA=1))
        pairs = zip(p.products, lane.blocks, strict=True)
        drs.append(_joined(g, [g("Gemm", da, rows, transA=1) for da, (rows, _) in pairs]))
        # The two biases have one cotangent where they enter as a sum: it is summed once.
        terms = (p.inputs, *p.products)
        sums = {term: sum_axes(g, term, [0]) for term in terms}
        dbs.append(_joined(g, [sums[term] for term in terms]))
    results = [p for _, _, p in pulled]
    dx = add_all(g, *dxs)
    return (
        dx and reshape(g, dx, g.shape(node.inputs[0])),
        *(_stacked(g, parts) for parts in (dws, drs, dbs)),
        None,
        _stacked(g, [p.initial_h for p in results]),
        _stacked(g, [p.initial_c for p in results]),
        _stacked(g, [p.peepholes for p in results]),
    )


def _driven(
    g: GraphBuilder,
    node: Node,
    tangents: Tangents,
    d: Direction,
    blocks: Sequence[tuple[str, int]],
) -> Driven:
    """The tangents of what enters one direction."""
    x, *others = (*tangents, *(None,) * 8)[:8]
    w, r, b, _, h, c, p = (
        t and one(g, t, d.number, g.shape(node.inputs[index]))
        for index, t in enumerate(others, start=1)
    )
    biases = g.multi("Split", b, outputs=2, axis=0, num_outputs=2) if b else (None, None)
    inputs = [product(g, reshape(g, x, (d.steps * d.batch, -1)), d.w, None)] if x else []
    inputs += [product(g, d.x, w, None)] if w else []
    products: list[str] = []
    if r:
        parts = d.split(g, r, *(gates for _, gates in blocks), axis=0)
        pairs = zip(blocks, parts, strict=True)
        columns = [product(g, rows, part, None) for (rows, _), part in pairs]
        products = [_joined(g, columns, axis=1)]
    return Driven(
        inputs=_with_bias(g, d, inputs, biases[0]),
        products=_with_bias(g, d, products, biases[1]),
        initial_h=h or d.nought(g),
        initial_c=c or d.nought(g),
        peepholes=p,
    )


def _with_bias(
    g: GraphBuilder, d: Direction, rows: Sequence[str], bias: str | None
) -> str | None:
    if bias and not rows:
        return g("Expand", bias, g.ints(d.steps * d.batch, 1))
    return add_all(g, *rows, bias)


def _joined(g: GraphBuilder, parts: Sequence[str], axis: int = 0) -> str:
    return parts[0] if len(parts) == 1 else g("Concat", *parts, axis=axis)


def _stacked(g: GraphBuilder, parts: Sequence[str | None]) -> str | None:
    """The directions' values along a new first axis; all of them are there, or none."""
    there = [g("Unsqueeze", part, g.ints(0)) for part in parts if part]
    return _joined(g, there) if there else None
