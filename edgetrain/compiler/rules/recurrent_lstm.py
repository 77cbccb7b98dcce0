"""The long short-term memory cell, with or without peepholes.

    i, o, f = s(a_i + Pi * c), s(a_o + Po * c'), s(a_f + Pf * c)
    c' = f * c + i * t(a_c)
    h' = o * u(c')

with a = x W^T + h R^T + Wb + Rb in the order i, o, f, c, and s, t, u the activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import add_all
from edgetrain.compiler.rules.recurrent_cell import (
    Cell,
    Driven,
    Flow,
    Pulled,
    Pushed,
    plus,
    product,
)
from edgetrain.compiler.rules.recurrent_direction import Direction
from edgetrain.compiler.rules.recurrent_scan import Stepped, Values, scan
from edgetrain.compiler.rules.shaping import sum_axes, zeros

_GATE, _CANDIDATE, _HIDDEN = range(3)  # the activations' order


@dataclass(frozen=True, slots=True)
class LinearLSTM:
    """The cell's derivative.

        ta = u + th R^T
        tc' = keep * tc + ri * ta_i + rf * ta_f + rc * ta_c
        th' = show * tc' + ro * ta_o

    Here u is the tangent of all that enters the gates apart from the running states,
    whose way through the peepholes is part of `keep` and `show`.

    Attributes:
        d: the direction.
        before: hidden state before each step, [T*N, H], as all but `rates`.
        cells_before, cells: cell state before and after each step.
        rates: ri, ro, rf and rc side by side, [T*N, 4*H].
        keep, show: as above.
    """

    d: Direction
    before: str
    cells_before: str
    cells: str
    rates: str
    keep: str
    show: str

    @property
    def blocks(self) -> tuple[tuple[str, int], ...]:
        return ((self.before, 4),)

    def pull(self, g: GraphBuilder, flow: Flow) -> Pulled:
        def step(b: GraphBuilder, states: Values, parts: Values, dy: str | None) -> Stepped:
            rates, keep, show = parts
            dh = plus(b, states[0], dy)
            dc = b("Add", states[1], b("Mul", dh, show))
            da = b("Mul", b("Concat", dc, dh, dc, dc, axis=1), rates)
            return (b("MatMul", da, self.d.r), b("Mul", dc, keep)), (da,)

        states = (flow.h or self.d.nought(g), flow.c or self.d.nought(g))
        course = self.d.back(self.rates, self.keep, self.show, extra=flow.y)
        (dh, dc), (da,) = scan(g, step, states, course)
        peepholes = self._pull_peepholes(g, da) if self.d.peepholes else None
        return Pulled(da, (da,), dh, dc, peepholes)

    def push(self, g: GraphBuilder, driven: Driven) -> Pushed:
        def step(b: GraphBuilder, states: Values, parts: Values, u: str | None) -> Stepped:
            rates, keep, show = parts
            ta = b("Mul", product(b, states[0], self.d.r, u), rates)
            ti, to, tf, tc = self.d.split(b, ta, 1, 1, 1, 1)
            new = b("Sum", b("Mul", states[1], keep), ti, tf, tc)
            th = b("Add", b("Mul", new, show), to)
            return (th, new), (th,)

        u = driven.gates(g)
        if driven.peepholes:
            u = plus(g, self._push_peepholes(g, driven.peepholes), u)
        course = self.d.ahead(self.rates, self.keep, self.show, extra=u)
        states = (driven.initial_h, driven.initial_c)
        (th, tc), (ty,) = scan(g, step, states, course)
        return Pushed(ty, th, tc)

    def _pull_peepholes(self, g: GraphBuilder, da: str) -> str:
        seen = g("Concat", self.cells_before, self.cells, self.cells_before, axis=1)
        ours, _ = self.d.split(g, da, 3, 1)
        return sum_axes(g, g("Mul", ours, seen), [0])

    def _push_peepholes(self, g: GraphBuilder, tp: str) -> str:
        ti, to, tf = self.d.split(g, tp, 1, 1, 1)
        terms = (
            g("Mul", self.cells_before, ti),
            g("Mul", self.cells, to),
            g("Mul", self.cells_before, tf),
            zeros(g, (self.d.steps * self.d.batch, self.d.hidden), self.d.x),
        )
        return g("Concat", *terms, axis=1)


def _linearise(g: GraphBuilder, _: Node, d: Direction) -> LinearLSTM:
    """Run the cell states again, which the operator keeps to itself, and the gates."""
    before = d.before(g, d.initial_h, d.y)
    products = product(g, d.x, d.w, add_all(g, d.input_bias, d.recurrent_bias))
    gates = product(g, before, d.r, products)
    ai, ao, af, ac = d.split(g, gates, 1, 1, 1, 1)
    candidate = d.activate(g, _CANDIDATE, ac)
    peepholes = d.split(g, d.peepholes, 1, 1, 1) if d.peepholes else None
    if peepholes:
        cells = _cells_seen_by_gates(g, d, (ai, af, candidate), peepholes)
        cells_before = d.before(g, d.initial_c, cells)
        pi, po, pf = peepholes
        ai = g("Add", ai, g("Mul", cells_before, pi))
        ao = g("Add", ao, g("Mul", cells, po))
        af = g("Add", af, g("Mul", cells_before, pf))
    i, o, f = (d.activate(g, _GATE, a) for a in (ai, ao, af))
    if not peepholes:
        cells = _cells(g, d, f, g("Mul", i, candidate))
        cells_before = d.before(g, d.initial_c, cells)
    shown = d.activate(g, _HIDDEN, cells)
    ri = d.times_slope(g, _GATE, i, candidate)
    ro = d.times_slope(g, _GATE, o, shown)
    rf = d.times_slope(g, _GATE, f, cells_before)
    rc = d.times_slope(g, _CANDIDATE, candidate, i)
    keep, show = f, d.times_slope(g, _HIDDEN, shown, o)
    if peepholes:
        keep = g("Sum", keep, g("Mul", ri, pi), g("Mul", rf, pf))
        show = g("Add", show, g("Mul", ro, po))
    rates = g("Concat", ri, ro, rf, rc, axis=1)
    return LinearLSTM(d, before, cells_before, cells, rates, keep, show)


def _cells(g: GraphBuilder, d: Direction, forget: str, added: str) -> str:
    """c' = forget * c + added; what is kept of c is collected, which spares a copy."""

    def step(b: GraphBuilder, states: Values, parts: Values, _: str | None) -> Stepped:
        kept = b("Mul", states[0], parts[0])
        return (b("Add", kept, parts[1]),), (kept,)

    _, (kept,) = scan(g, step, (d.initial_c,), d.ahead(forget, added))
    return g("Add", kept, added)


def _cells_seen_by_gates(
    g: GraphBuilder, d: Direction, parts: tuple[str, str, str], peepholes: list[str]
) -> str:
    """The cell states where the gates themselves depend on them."""
    pi, _, pf = peepholes

    def step(b: GraphBuilder, states: Values, parts: Values, _: str | None) -> Stepped:
        (cell,), (ai, af, candidate) = states, parts
        i = d.activate(b, _GATE, b("Add", ai, b("Mul", cell, pi)))
        f = d.activate(b, _GATE, b("Add", af, b("Mul", cell, pf)))
        new = b("Add", b("Mul", f, cell), b("Mul", i, candidate))
        return (new,), (new,)

    return scan(g, step, (d.initial_c,), d.ahead(*parts))[1][0]


LSTM: Final = Cell(("Sigmoid", "Tanh", "Tanh"), _linearise)
