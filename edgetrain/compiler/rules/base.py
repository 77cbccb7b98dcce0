"""What a differentiation rule is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto

from edgetrain.compiler.build import GraphBuilder, Node


class Saves(Flag):
    """The primal values a VJP reads, hence what a stage must stash."""

    NOTHING = 0
    INPUTS = auto()
    OUTPUT = auto()


# One per input of the node; None where it is not differentiable or always zero.
Cotangents = tuple[str | None, ...]
VJP = Callable[[GraphBuilder, Node, str], Cotangents]
JVP = Callable[[GraphBuilder, Node, tuple[str | None, ...]], str | None]


@dataclass(frozen=True, slots=True)
class OpRule:
    """How one ONNX operator is differentiated with respect to its inputs, in both modes.

    Only the first output is differentiable; `MultiRule` is for ops with several.

    Attributes:
        vjp: cotangent of the output to cotangents of the inputs. It may emit cotangents
            nobody asked for: the driver drops dead nodes. With `broadcasts`, a cotangent
            may have the output's shape: the driver sums it to the input's.
        jvp: tangents of the inputs (None is zero) to the tangent of the output.
        saves: what `vjp` reads of the primal values.
        broadcasts: the op follows numpy's broadcasting.
    """

    vjp: VJP
    jvp: JVP
    saves: Saves
    broadcasts: bool = False


def add_all(g: GraphBuilder, *terms: str | None) -> str | None:
    """Sum the terms that are present; None when all are zero."""
    present = [t for t in terms if t is not None]
    if not present:
        return None
    total = present[0]
    for term in present[1:]:
        total = g("Add", total, term)
    return total
