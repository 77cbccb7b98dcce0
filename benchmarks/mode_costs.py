"""Forward-pass equivalents of a training step by gradient mode: counted, not timed.

One is the multiply-adds of the linear operations of a plain forward of the whole model.
What is counted is what a stage runs: a draw of noise computes the values again beside
their tangents, and estimated gradients are contracted with values computed once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgetrain.estimator_spec import JVP, WEIGHTS, EstimatorSpec

LEARNS_APART = ("local", "local_vjp", "frozen")


@dataclass(frozen=True)
class Work:
    """Multiply-adds a sample of one stage.

    Attributes:
        layers: of each linear operation, in order.
        exits: of those at the ends of residual branches.
        head: of an auxiliary head at its end.
        reached: derivatives come from, or go to, the stage before.
        last: it is the last stage.
    """

    layers: tuple[int, ...]
    exits: int = 0
    head: int = 0
    reached: bool = False
    last: bool = False

    @property
    def forward(self) -> int:
        return sum(self.layers)

    @property
    def tail(self) -> int:
        """What derivatives go through: not the first layer, unless they reach the input."""
        return self.forward - (0 if self.reached else self.layers[0])


Formula = Callable[[Work, EstimatorSpec], int]


def _exact(work: Work, _: EstimatorSpec) -> int:
    return 2 * work.forward + work.tail


def _hybrid(work: Work, spec: EstimatorSpec) -> int:
    f = work.forward
    if spec.noise == WEIGHTS:
        return 2 * f + work.layers[-1] + 2 * spec.tangents * f
    each = f + work.tail if spec.form == JVP else 3 * f
    return 3 * f + spec.tangents * each


def _carried(work: Work, spec: EstimatorSpec) -> int:
    f = work.forward
    if spec.noise == WEIGHTS:
        exact = f + work.layers[-1] if work.last else 0
        return f + exact + spec.sides * spec.tangents * f
    each = f + work.tail if spec.form == JVP else spec.sides * f
    again = f if spec.control_variate else 0
    return 3 * f + again + spec.tangents * each


def _spsa(work: Work, spec: EstimatorSpec) -> int:
    return work.forward * (1 + spec.sides * spec.tangents)


FORMULAS: dict[str, Formula] = {
    "vjp": _exact,
    "frozen": lambda work, _: work.forward,
    "identity": lambda work, _: 2 * work.forward + work.exits,
    "hybrid": _hybrid,
    "local_vjp": lambda work, spec: _exact(work, spec) + 3 * work.head,
    "local": lambda work, spec: _hybrid(work, spec) + 3 * work.head,
    "forward_gradient": _carried,
    "spsa": _spsa,
}


def forward_equivalents(
    stages: Sequence[Work], modes: Sequence[str], spec: EstimatorSpec
) -> float:
    """Of one step of all stages together, each in its mode."""
    spent = 0
    for number, (work, mode) in enumerate(zip(stages, modes, strict=True)):
        reached = number > 0 and modes[number - 1] not in LEARNS_APART
        last = number == len(stages) - 1
        placed = Work(work.layers, work.exits, work.head, reached, last)
        spent += FORMULAS[mode](placed, spec)
    return spent / sum(work.forward for work in stages)
