"""What a differentiation rule is, and the two shapes that most rules have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto

from edgetrain.compiler.build import GraphBuilder, Node


class Saves(Flag):
    """The primal values a VJP reads, hence what a stage must stash."""

    NOTHING = 0
    FIRST = auto()  # the first input
    REST = auto()  # the other inputs
    OUTPUT = auto()  # the first output
    EXTRA = auto()  # the other outputs
    INPUTS = FIRST | REST


# One per input of the node; None where it is not differentiable or always zero.
# Trailing Nones may be left out.
Cotangents = tuple[str | None, ...]
Tangents = tuple[str | None, ...]
VJP = Callable[[GraphBuilder, Node, str], Cotangents]
JVP = Callable[[GraphBuilder, Node, Tangents], str | None]


@dataclass(frozen=True, slots=True)
class OpRule:
    """How one ONNX operator is differentiated with respect to its inputs, in both modes.

    Only the first output is differentiable; `MultiRule` is for ops with several.

    Attributes:
        vjp: cotangent of the output to cotangents of the inputs. It may emit cotangents
            nobody asked for: the driver drops dead nodes. With `broadcasts`, a cotangent
            may have the output's shape: the driver sums it to the input's.
        jvp: tangents of the inputs (None is zero) to the tangent of the output. With
            `broadcasts`, the result may need broadcasting: the driver expands it.
        saves: what `vjp` reads of the primal values.
        broadcasts: the op follows numpy's broadcasting.
    """

    vjp: VJP
    jvp: JVP
    saves: Saves
    broadcasts: bool = False


@dataclass(frozen=True, slots=True)
class MultiRule:
    """How an operator with several differentiable outputs is differentiated.

    Attributes:
        vjp: cotangents of the outputs (None is zero) to cotangents of the inputs.
        jvp: tangents of the inputs to tangents of the outputs.
        saves: what `vjp` reads of the primal values.
    """

    vjp: Callable[[GraphBuilder, Node, Cotangents], Cotangents]
    jvp: Callable[[GraphBuilder, Node, Tangents], Tangents]
    saves: Saves


def saved(rule: OpRule | MultiRule, node: Node) -> set[str]:
    """The primal values of `node` that its VJP may read, constants included."""
    chosen = (
        (Saves.FIRST, node.inputs[:1]),
        (Saves.REST, node.inputs[1:]),
        (Saves.OUTPUT, node.outputs[:1]),
        (Saves.EXTRA, node.outputs[1:]),
    )
    return {name for part, names in chosen if part in rule.saves for name in names if name}


def symmetric_rule(
    apply: Callable[[GraphBuilder, Node, str], str], saves: Saves = Saves.NOTHING
) -> OpRule:
    """The rule of an op of one input whose Jacobian is symmetric, such as a diagonal one.

    Args:
        apply: multiplies a vector by the Jacobian.
        saves: what `apply` reads.
    """

    def vjp(g: GraphBuilder, node: Node, dy: str) -> Cotangents:
        return (apply(g, node, dy),)

    def jvp(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
        return tangents[0] and apply(g, node, tangents[0])

    return OpRule(vjp, jvp, saves)


def linear_rule(vjp: VJP, saves: Saves = Saves.NOTHING) -> OpRule:
    """The rule of an op that is linear in its first input, the only one differentiated."""
    return OpRule(vjp, reapply, saves)


def reapply(g: GraphBuilder, node: Node, tangents: Tangents) -> str | None:
    """The tangent of a linear op: the op itself, applied to the tangent."""
    return tangents[0] and g(node.op_type, tangents[0], *node.inputs[1:], **node.attributes)


def add_all(g: GraphBuilder, *terms: str | None) -> str | None:
    """Sum the terms that are present; None when all are zero."""
    present = [t for t in terms if t is not None]
    if not present:
        return None
    total = present[0]
    for term in present[1:]:
        total = g("Add", total, term)
    return total
