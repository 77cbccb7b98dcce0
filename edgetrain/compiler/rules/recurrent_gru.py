"""The gated recurrent unit, with its reset gate before or after the recurrent product.

    z, r = s(a_z + b_z), s(a_r + b_r)
    n = t(a_h + (r * h) Rh^T + Rbh)         linear_before_reset = 0
    n = t(a_h + r * b_h)                    linear_before_reset = 1
    h' = (1 - z) * n + z * h

with a = x W^T + Wb and b = h R^T + Rb in the order z, r, h, and s, t the activations.
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
    Linear,
    Pulled,
    Pushed,
    plus,
    product,
)
from edgetrain.compiler.rules.recurrent_direction import Direction
from edgetrain.compiler.rules.recurrent_scan import Stepped, Values, scan

_GATE, _CANDIDATE = range(2)  # the activations' order


@dataclass(frozen=True, slots=True)
class ResetAfter:
    """The cell's derivative with linear_before_reset = 1.

        th' = z * th + rz * (ta_z + tb_z) + rr * (ta_r + tb_r) + rn * ta_h + rn * r * tb_h

    Attributes:
        d: the direction.
        before: hidden state before each step, [T*N, H].
        z: the update gate, [T*N, H].
        rates_a, rates_b: the factors of ta and of tb side by side, [T*N, 3*H].
        rn: the factor of the candidate's pre-activation, [T*N, H].
    """

    d: Direction
    before: str
    z: str
    rates_a: str
    rates_b: str
    rn: str

    @property
    def blocks(self) -> tuple[tuple[str, int], ...]:
        return ((self.before, 3),)

    def pull(self, g: GraphBuilder, flow: Flow) -> Pulled:
        def step(b: GraphBuilder, states: Values, parts: Values, dy: str | None) -> Stepped:
            z, rates = parts
            dh = plus(b, states[0], dy)
            db = b("Mul", b("Concat", dh, dh, dh, axis=1), rates)
            back = b("Add", b("Mul", dh, z), b("MatMul", db, self.d.r))
            return (back,), (db, dh)

        states = (flow.h or self.d.nought(g),)
        course = self.d.back(self.z, self.rates_b, extra=flow.y)
        (first,), (db, dh) = scan(g, step, states, course)
        gates, _ = self.d.split(g, db, 2, 1)
        da = g("Concat", gates, g("Mul", dh, self.rn), axis=1)
        return Pulled(da, (db,), first)

    def push(self, g: GraphBuilder, driven: Driven) -> Pushed:
        def step(b: GraphBuilder, states: Values, parts: Values, u: str | None) -> Stepped:
            z, rates = parts
            tb = b("Mul", product(b, states[0], self.d.r, None), rates)
            th = b("Sum", b("Mul", states[0], z), *self.d.split(b, tb, 1, 1, 1))
            th = plus(b, th, u)
            return (th,), (th,)

        given = add_all(
            g,
            driven.inputs and g("Mul", driven.inputs, self.rates_a),
            driven.products and g("Mul", driven.products, self.rates_b),
        )
        u = given and g("Sum", *self.d.split(g, given, 1, 1, 1))
        course = self.d.ahead(self.z, self.rates_b, extra=u)
        (th,), (ty,) = scan(g, step, (driven.initial_h,), course)
        return Pushed(ty, th)


@dataclass(frozen=True, slots=True)
class ResetBefore:
    """The cell's derivative with linear_before_reset = 0.

        ta_z, ta_r = u_z + th Rz^T, u_r + th Rr^T
        tn = u_h + (r * th + rr * ta_r) Rh^T
        th' = z * th + rz * ta_z + rn * tn

    Here u is the tangent of all that enters the gates but th.

    Attributes:
        d: the direction.
        before, reset: hidden state before each step, and r times it, [T*N, H].
        z, r: the gates, [T*N, H].
        rz, rr, rn: as above, [T*N, H].
    """

    d: Direction
    before: str
    reset: str
    z: str
    r: str
    rz: str
    rr: str
    rn: str

    @property
    def blocks(self) -> tuple[tuple[str, int], ...]:
        return ((self.before, 2), (self.reset, 1))

    def pull(self, g: GraphBuilder, flow: Flow) -> Pulled:
        gates_r, candidate_r = self.d.split(g, self.d.r, 2, 1, axis=0)

        def step(b: GraphBuilder, states: Values, parts: Values, dy: str | None) -> Stepped:
            z, r, rz, rr, rn = parts
            dh = plus(b, states[0], dy)
            dn = b("Mul", dh, rn)
            dreset = b("MatMul", dn, candidate_r)
            gates = b("Concat", b("Mul", dh, rz), b("Mul", dreset, rr), axis=1)
            back = b(
                "Sum", b("Mul", dh, z), b("Mul", dreset, r), b("MatMul", gates, gates_r)
            )
            return (back,), (gates, dn)

        states = (flow.h or self.d.nought(g),)
        course = self.d.back(*self._coefficients, extra=flow.y)
        (first,), (gates, dn) = scan(g, step, states, course)
        return Pulled(g("Concat", gates, dn, axis=1), (gates, dn), first)

    def push(self, g: GraphBuilder, driven: Driven) -> Pushed:
        gates_r, candidate_r = self.d.split(g, self.d.r, 2, 1, axis=0)

        def step(b: GraphBuilder, states: Values, parts: Values, u: str | None) -> Stepped:
            z, r, rz, rr, rn = parts
            gates_u, candidate_u = self.d.split(b, u, 2, 1) if u else (None, None)
            gates = product(b, states[0], gates_r, gates_u)
            tz, tr = self.d.split(b, gates, 1, 1)
            treset = b("Add", b("Mul", states[0], r), b("Mul", tr, rr))
            tn = product(b, treset, candidate_r, candidate_u)
            th = b("Sum", b("Mul", states[0], z), b("Mul", tz, rz), b("Mul", tn, rn))
            return (th,), (th,)

        course = self.d.ahead(*self._coefficients, extra=driven.gates(g))
        (th,), (ty,) = scan(g, step, (driven.initial_h,), course)
        return Pushed(ty, th)

    @property
    def _coefficients(self) -> Values:
        return self.z, self.r, self.rz, self.rr, self.rn


def _linearise(g: GraphBuilder, node: Node, d: Direction) -> Linear:
    """Run the gates again, for all steps at once."""
    before = d.before(g, d.initial_h, d.y)
    a_gates, a_new = d.split(g, product(g, d.x, d.w, d.input_bias), 2, 1)
    if node.get("linear_before_reset", 0):
        b_gates, b_new = d.split(g, product(g, before, d.r, d.recurrent_bias), 2, 1)
        z, r = _gates(g, d, g("Add", a_gates, b_gates))
        n = d.activate(g, _CANDIDATE, g("Add", a_new, g("Mul", r, b_new)))
        rz, rn = _update_rates(g, d, before, z, n)
        rr = d.times_slope(g, _GATE, r, g("Mul", rn, b_new))
        rates_a = g("Concat", rz, rr, rn, axis=1)
        rates_b = g("Concat", rz, rr, g("Mul", rn, r), axis=1)
        return ResetAfter(d, before, z, rates_a, rates_b, rn)
    r_gates, r_new = d.split(g, d.r, 2, 1, axis=0)
    biases: tuple[str | None, ...] = (None, None)
    if d.recurrent_bias:
        biases = tuple(d.split(g, d.recurrent_bias, 2, 1))
    gates = g("Add", a_gates, product(g, before, r_gates, biases[0]))
    z, r = _gates(g, d, gates)
    reset = g("Mul", r, before)
    n = d.activate(g, _CANDIDATE, g("Add", a_new, product(g, reset, r_new, biases[1])))
    rz, rn = _update_rates(g, d, before, z, n)
    rr = d.times_slope(g, _GATE, r, before)
    return ResetBefore(d, before, reset, z, r, rz, rr, rn)


def _gates(g: GraphBuilder, d: Direction, both: str) -> tuple[str, str]:
    z, r = (d.activate(g, _GATE, part) for part in d.split(g, both, 1, 1))
    return z, r


def _update_rates(
    g: GraphBuilder, d: Direction, before: str, z: str, n: str
) -> tuple[str, str]:
    """The slopes of h' = (1 - z) * n + z * h in the pre-activations of z and of n."""
    rz = d.times_slope(g, _GATE, z, g("Sub", before, n))
    rn = d.times_slope(g, _CANDIDATE, n, g("Sub", g.scalar(1, d.x), z))
    return rz, rn


GRU: Final = Cell(("Sigmoid", "Tanh"), _linearise)
