"""What the recurrent operators have in common, and what each must give.

Linearised about its primal values, a direction is a linear recurrence: `push` runs it
ahead, `pull` its transpose backwards. Only that recurrence is sequential. The products
with the input, all gates, the coefficients and the gradients of the weights are computed
for all steps at once, from the hidden states that the operator yields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules.base import add_all
from edgetrain.compiler.rules.recurrent_direction import Direction


@dataclass(frozen=True, slots=True)
class Flow:
    """Cotangents of what one direction yields; None is zero.

    Attributes:
        y: of the hidden state of each step, [T*N, H].
        h, c: of the last hidden and cell state, [N, H].
    """

    y: str | None
    h: str | None
    c: str | None


@dataclass(frozen=True, slots=True)
class Pulled:
    """Cotangents of what enters one direction.

    Attributes:
        inputs: of x @ W^T + Wb, [T*N, G*H].
        products: of the recurrent products, one for each block of `Linear.blocks`.
        initial_h, initial_c: [N, H]; c is None where the cell has no such state.
        peepholes: [3*H], or None.
    """

    inputs: str
    products: tuple[str, ...]
    initial_h: str
    initial_c: str | None = None
    peepholes: str | None = None


@dataclass(frozen=True, slots=True)
class Driven:
    """Tangents of what enters one direction; None is zero.

    Attributes:
        inputs: of x @ W^T + Wb, [T*N, G*H].
        products: of the recurrent products, so far as R and Rb change them, [T*N, G*H].
        initial_h, initial_c: [N, H].
        peepholes: [3*H].
    """

    inputs: str | None
    products: str | None
    initial_h: str
    initial_c: str
    peepholes: str | None

    def gates(self, g: GraphBuilder) -> str | None:
        """Of the pre-activations, where the two products simply add up."""
        return add_all(g, self.inputs, self.products)


@dataclass(frozen=True, slots=True)
class Pushed:
    """Tangents of what one direction yields.

    Attributes:
        y: of the hidden state of each step, [T*N, H].
        h, c: of the last hidden and cell state, [N, H]; c is None where there is none.
    """

    y: str
    h: str
    c: str | None = None


class Linear(Protocol):
    """One direction, linearised.

    Attributes:
        blocks: what each block of R's rows is multiplied with, [T*N, H], and how many
            gates the block has.
    """

    @property
    def blocks(self) -> tuple[tuple[str, int], ...]: ...

    def pull(self, g: GraphBuilder, flow: Flow) -> Pulled: ...

    def push(self, g: GraphBuilder, driven: Driven) -> Pushed: ...


@dataclass(frozen=True, slots=True)
class Cell:
    """One recurrent operator.

    Attributes:
        activations: the operator's defaults for one direction.
        linearise: evaluates the coefficients of one direction of a node.
    """

    activations: tuple[str, ...]
    linearise: Callable[[GraphBuilder, Node, Direction], Linear]


def product(g: GraphBuilder, rows: str, weight: str, addend: str | None) -> str:
    """rows @ weight^T + addend."""
    return g("Gemm", rows, weight, *filter(None, (addend,)), transB=1)


def plus(g: GraphBuilder, value: str, addend: str | None) -> str:
    return g("Add", value, addend) if addend else value
