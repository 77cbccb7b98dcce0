"""A model on its way to a Program, and what its user should know of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx

from edgetrain.compiler import agreement, quantised, weights
from edgetrain.compiler.program import Tie
from edgetrain.compiler.tidy import all_nodes, graphs

Array = npt.NDArray[Any]
_NAMED: Final = 4  # names that a remark lists before it only counts


@dataclass(slots=True, kw_only=True)
class Draft:
    """A model on its way to a Program.

    Attributes:
        original: the file's graph in inference form.
        model: the copy that is rewritten, in place or replaced, step by step.
        batch: samples a microbatch.
        extents: the rows that `original` takes, by input.
        sample: a random value of each data input, for the larger batch of the two.
        feeds: the same for `batch` rows.
        apart: large weights, which both graphs take as inputs, in the file's type.
        weights: all weights found so far.
        constants: the tensors that the file holds.
        tie: matrices that are equal become one weight.
        integers: how many tensors of the file are quantised.
    """

    original: onnx.ModelProto
    model: onnx.ModelProto
    batch: int
    extents: Mapping[str, int]
    sample: Mapping[str, Array]
    feeds: dict[str, Array]
    apart: Mapping[str, Array]
    weights: dict[str, npt.NDArray[np.float32]]
    constants: frozenset[str]
    tie: bool = False
    remarks: list[str] = field(default_factory=list)
    tolerance: float = agreement.TOLERANCE
    ties: tuple[Tie, ...] = ()
    integers: int = 0

    @property
    def all_feeds(self) -> dict[str, Array]:
        return {**self.feeds, **self.weights}

    @property
    def trial(self) -> agreement.Trial:
        return agreement.Trial(
            self.original,
            self.model,
            self.weights,
            self.batch,
            self.extents,
            tolerance=self.tolerance,
            apart=self.apart,
        )


def held_constants(graph: onnx.GraphProto, fixed: Iterable[str]) -> frozenset[str]:
    """The names of the tensors that the file holds, in all its graphs."""
    names = {t.name for inner in graphs(graph) for t in inner.initializer}
    names.update(n.output[0] for n in all_nodes(graph) if n.op_type == "Constant")
    return frozenset(names.difference(fixed))


def remark_types(draft: Draft, types: frozenset[str]) -> None:
    if types:
        draft.remarks.append(
            f"The file holds {' and '.join(sorted(types))} tensors: they train as"
            " float32 and are rounded to the file's type on export."
        )


def remark_integers(draft: Draft) -> None:
    draft.integers = quantised.count(draft.model.graph)
    if draft.integers:
        draft.remarks.append(
            f"Quantised in the file, and constant in training: {draft.integers} tensors."
        )


def remark_dropout(draft: Draft) -> None:
    if any(node.op_type == "Dropout" for node in draft.model.graph.node):
        draft.remarks.append("Dropout is removed: the model trains without it.")


def remark_sharing(draft: Draft) -> None:
    shared = weights.tied(draft.model.graph, draft.weights)
    if shared:
        draft.remarks.append(
            "Parameters of several operators, which train as one, as the file has them (an"
            f" exporter may have merged them for equal values): {listing(shared)}."
        )


def remark_frozen(draft: Draft) -> None:
    frozen = [n for n in weights.frozen(draft.model.graph) if n in draft.constants]
    if frozen:
        draft.remarks.append(
            "Constant in training, as the file holds them inside a function or under a name"
            f" it uses twice: {listing(frozen)}."
        )


def listing(names: Sequence[str]) -> str:
    """The first few of them."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
