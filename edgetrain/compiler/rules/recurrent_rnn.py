"""The simple recurrent cell, h' = f(x W^T + h R^T + Wb + Rb)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edgetrain.compiler.build import GraphBuilder, Node
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


@dataclass(frozen=True, slots=True)
class LinearRNN:
    """th' = slope * (u + th R^T); u is the tangent of all else that enters f.

    Attributes:
        d: the direction.
        before: hidden state before each step, [T*N, H].
        slope: of f at each step, [T*N, H].
    """

    d: Direction
    before: str
    slope: str

    @property
    def blocks(self) -> tuple[tuple[str, int], ...]:
        return ((self.before, 1),)

    def pull(self, g: GraphBuilder, flow: Flow) -> Pulled:
        def step(b: GraphBuilder, states: Values, parts: Values, dy: str | None) -> Stepped:
            da = b("Mul", plus(b, states[0], dy), parts[0])
            return (b("MatMul", da, self.d.r),), (da,)

        states = (flow.h or self.d.nought(g),)
        (dh,), (da,) = scan(g, step, states, self.d.back(self.slope, extra=flow.y))
        return Pulled(da, (da,), dh)

    def push(self, g: GraphBuilder, driven: Driven) -> Pushed:
        def step(b: GraphBuilder, states: Values, parts: Values, u: str | None) -> Stepped:
            th = b("Mul", product(b, states[0], self.d.r, u), parts[0])
            return (th,), (th,)

        course = self.d.ahead(self.slope, extra=driven.gates(g))
        (th,), (ty,) = scan(g, step, (driven.initial_h,), course)
        return Pushed(ty, th)


def _linearise(g: GraphBuilder, _: Node, d: Direction) -> LinearRNN:
    one = g.scalar(1, d.x)
    return LinearRNN(d, d.before(g, d.initial_h, d.y), d.times_slope(g, 0, d.y, one))


RNN: Final = Cell(("Tanh",), _linearise)
