"""One direction of an LSTM, GRU or RNN node: its operands, without the direction axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from edgetrain.compiler.build import GraphBuilder, Node
from edgetrain.compiler.rules import activation
from edgetrain.compiler.rules.recurrent_scan import Course
from edgetrain.compiler.rules.shaping import reshape, zeros
from edgetrain.errors import UnsupportedOpError

# All can be differentiated from their outputs alone.
_SLOPES: Final[Mapping[str, Callable[[GraphBuilder, Node, str], str]]] = {
    "HardSigmoid": activation.hard_sigmoid,
    "Relu": activation.relu,
    "Sigmoid": activation.sigmoid,
    "Tanh": activation.tanh,
}
_REFUSED: Final[Mapping[str, str]] = {
    "activation_alpha": "its activations have parameters of their own; use plain ones",
    "activation_beta": "its activations have parameters of their own; use plain ones",
    "clip": "its cell clips; export it without",
    "input_forget": "its input and forget gates are one; export it with both",
    "layout": "it has the batch first; export it with layout 0, the time first",
}


@dataclass(frozen=True, slots=True)
class Direction:
    """What one direction works on: T steps, N sequences, I features, H units, G gates.

    Values over time are kept as rows, [T*N, ...], in the order of the input, whichever
    end the direction starts from.

    Attributes:
        number: 0, or 1 for the second of a bidirectional node.
        from_end: it runs from the last step to the first.
        steps, batch, hidden: T, N, H.
        activations: of the gates, in the order of the attribute.
        x: [T*N, I].
        w, r: [G*H, I] and [G*H, H].
        input_bias, recurrent_bias: [G*H] each, or None.
        initial_h, initial_c: [N, H]; zeros where the node has none.
        peepholes: [3*H], or None.
        y: the hidden state of each step, [T*N, H].
    """

    number: int
    from_end: bool
    steps: int
    batch: int
    hidden: int
    activations: tuple[str, ...]
    x: str
    w: str
    r: str
    input_bias: str | None
    recurrent_bias: str | None
    initial_h: str
    initial_c: str
    peepholes: str | None
    y: str

    def nought(self, g: GraphBuilder) -> str:
        """A state that is zero, [N, H]."""
        return zeros(g, (self.batch, self.hidden), self.x)

    def before(self, g: GraphBuilder, initial: str, rows: str) -> str:
        """The state before each step, [T*N, H], from the states after each."""
        last = (self.steps - 1) * self.batch
        if self.from_end:
            rest = g("Slice", rows, g.ints(self.batch), g.ints(last + self.batch))
            return g("Concat", rest, initial, axis=0)
        return g("Concat", initial, g("Slice", rows, g.ints(0), g.ints(last)), axis=0)

    def ahead(self, *sequences: str, extra: str | None = None) -> Course:
        """Along sequences, [T*N, ...] each, the way the direction runs."""
        return Course(self.steps, self.batch, self.from_end, sequences, extra)

    def back(self, *sequences: str, extra: str | None) -> Course:
        """Along sequences the other way."""
        return Course(self.steps, self.batch, not self.from_end, sequences, extra)

    def activate(self, g: GraphBuilder, index: int, rows: str) -> str:
        """The activation number `index` of some gates' pre-activations."""
        return g(self.activations[index], rows)

    def times_slope(self, g: GraphBuilder, index: int, activated: str, factor: str) -> str:
        """`factor` times the activation's derivative where it gave `activated`."""
        name = self.activations[index]
        g.describe(activated, g.dtype(self.x), (self.steps * self.batch, self.hidden))
        return _SLOPES[name](g, Node(name, name, (), (activated,)), factor)

    def split(self, g: GraphBuilder, value: str, *gates: int, axis: int = -1) -> list[str]:
        """Cut an axis into blocks of so many gates each."""
        if len(gates) == 1:
            return [value]
        sizes = g.ints(*(self.hidden * count for count in gates))
        return list(g.multi("Split", value, sizes, outputs=len(gates), axis=axis))


def directions(node: Node) -> int:
    return 2 if node.get("direction", "forward") == "bidirectional" else 1


def check(g: GraphBuilder, node: Node) -> None:
    """Refuse what no rule covers.

    Raises:
        UnsupportedOpError: it clips, couples gates, puts the batch first, has sequences
            of different lengths, or activations whose derivative their output does not
            give.
    """
    for attribute, advice in _REFUSED.items():
        if node.get(attribute, 0):
            raise UnsupportedOpError(node.op_type, node.name, advice)
    unknown = set(node.get("activations", ())) - set(_SLOPES)
    if unknown:
        raise UnsupportedOpError(
            node.op_type,
            node.name,
            f"of the activation {min(unknown)}; those with a rule are {', '.join(_SLOPES)}",
        )
    lengths = node.input(4)
    steps = g.shape(node.inputs[0])[0]
    if lengths and not (g.is_constant(lengths) and np.all(g.value(lengths) == steps)):
        raise UnsupportedOpError(
            node.op_type,
            node.name,
            f"its sequence_lens must be left out or all be the constant {steps}, the number"
            " of steps; pad the sequences and mask the output instead",
        )


def read(g: GraphBuilder, node: Node, activations: tuple[str, ...]) -> list[Direction]:
    """The directions of a node.

    Args:
        g: where to emit.
        node: run again for its hidden states if it does not yield them.
        activations: of one direction, where the node does not say.

    Raises:
        UnsupportedOpError: see `check`.
    """
    check(g, node)
    count, each = directions(node), len(activations)
    steps, batch, features = g.shape(node.inputs[0])
    x = reshape(g, node.inputs[0], (steps * batch, features))
    g.describe(x, g.dtype(node.inputs[0]), (steps * batch, features))
    y = node.output or g(node.op_type, *node.inputs, **node.attributes)
    chosen = tuple(node.get("activations", activations * count))
    return [
        _direction(g, node, (x, y), number, chosen[each * number :][:each])
        for number in range(count)
    ]


def _direction(
    g: GraphBuilder,
    node: Node,
    rows: tuple[str, str],
    number: int,
    activations: tuple[str, ...],
) -> Direction:
    (x, y), count = rows, directions(node)
    steps, batch, _ = g.shape(node.inputs[0])
    hidden = g.shape(node.inputs[2])[-1]

    def own(index: int) -> str:
        return one(g, node.inputs[index], number, g.shape(node.inputs[index]))

    def optional(index: int) -> str | None:
        return own(index) if node.input(index) else None

    biases: tuple[str | None, ...] = (None, None)
    if node.input(3):
        biases = g.multi("Split", own(3), outputs=2, axis=0, num_outputs=2)
    nought = zeros(g, (batch, hidden), x)
    hiddens = one(g, y, number, (steps, count, batch, hidden), axis=1)
    return Direction(
        number=number,
        from_end=number == 1 or node.get("direction", "forward") == "reverse",
        steps=steps,
        batch=batch,
        hidden=hidden,
        activations=activations,
        x=x,
        w=own(1),
        r=own(2),
        input_bias=biases[0],
        recurrent_bias=biases[1],
        initial_h=optional(5) or nought,
        initial_c=optional(6) or nought,
        peepholes=optional(7),
        y=reshape(g, hiddens, (steps * batch, hidden)),
    )


def one(
    g: GraphBuilder, value: str, number: int, shape: Sequence[int], *, axis: int = 0
) -> str:
    """Direction `number` of a value of `shape` that has the directions along `axis`."""
    if shape[axis] > 1:
        return g("Gather", value, g.constant(np.int64(number)), axis=axis)
    return reshape(g, value, (*shape[:axis], *shape[axis + 1 :]))
