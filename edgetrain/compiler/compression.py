"""Dense layers that train through tensor trains: the program rewritten to compute them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from edgetrain.compiler.build import Node
from edgetrain.compiler.draft import listing
from edgetrain.compiler.origin import origins, prepares, weights_of
from edgetrain.compiler.program import Program
from edgetrain.compiler.tensor_train import (
    PREFIX,
    TensorTrain,
    decompose,
    draw,
    fit,
)
from edgetrain.compiler.trainable import LINEAR_OPS
from edgetrain.compiler.values import value_table
from edgetrain.compiler.woven import computed_from_cores
from edgetrain.errors import ConfigError, GraphError

SMALLEST: Final = 4096  # elements of a weight that is worth it
DENSE_OPS: Final = frozenset({"Gemm", "MatMul"})
_FORM: Final = re.compile(r"tt:r=([1-9][0-9]{0,5})(,init=(random|svd))?")
_GAIN: Final = 2.0  # of He et al. 2015: variance times fan-in

Weights = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Compression:
    """What ``tt:r=8`` and ``tt:r=8,init=svd`` say.

    Attributes:
        text: as it was written, with the place.
        rank: largest rank of a train.
        from_file: start from the file's weights, as far as the rank allows; else from
            random values.
    """

    text: str
    rank: int
    from_file: bool = False


class Compressed(NamedTuple):
    """A program whose dense layers are computed from cores, and what they are worth."""

    program: Program
    trains: tuple[TensorTrain, ...]


def parse(
    choice: str | Sequence[str], *, place: str = "[model] trainable"
) -> Compression | None:
    """The compression that a choice of weights asks for; None: it asks for none.

    Args:
        choice: as for `select_trainable`.
        place: where the user wrote it, for messages.

    Raises:
        ConfigError: it begins as one and is malformed.
    """
    if not isinstance(choice, str) or not choice.startswith("tt:"):
        return None
    text = f"{place} = {choice!r}"
    found = _FORM.fullmatch(choice)
    if not found:
        raise ConfigError(
            f"{text}: write tt:r=N with a rank N >= 1, such as tt:r=8; or tt:r=8,init=svd"
            " to start from the file's weights"
        )
    return Compression(text, int(found[1]), found[3] == "svd")


def compress(program: Program, compression: Compression, *, seed: int) -> Compressed:
    """Put cores in the place of the weights of all dense layers but the last linear op.

    The graph computes each weight from its cores, under the weight's own name, and so do
    its derivatives; nothing that reads the weight changes. Biases, convolutions, small
    layers and what is used in other ways too stay as they are.

    Args:
        program: as normalised; it is not altered.
        compression: what is asked for.
        seed: of the random values.

    Returns:
        The program, its weights the cores and what stayed; `sources` names only what
        stayed. To write the trained file, merge with `tensor_train.dense`.

    Raises:
        ConfigError: no layer is to be compressed, or none pays at this rank.
        GraphError: the model uses the cores' names.
    """
    if any(name.startswith(PREFIX) for name in value_table(program.model)):
        raise GraphError(
            f"values of the model have names that begin with {PREFIX!r}, as the cores of"
            " compressed layers do: rename them, or train without compression"
        )
    layers = _layers(program)
    trains = _trains(program, layers, compression)
    generator = np.random.default_rng(seed)
    cores: dict[str, Weights] = {}
    for train in trains:
        values = (
            decompose(program.weights[train.weight], train)
            if compression.from_file
            else draw(train, math.sqrt(_GAIN / layers[train.weight]), generator)
        )
        cores[train.weight] = dict(zip(train.cores, values, strict=True))
    weights: Weights = {}
    for name, value in program.weights.items():
        weights |= cores.get(name, {name: value})
    rewritten = replace(
        program,
        model=computed_from_cores(program.model, trains),
        weights=weights,
        sources={n: s for n, s in program.sources.items() if n not in cores},
        remarks=(*program.remarks, _remark(trains, compression)),
    )
    return Compressed(rewritten, trains)


def _layers(program: Program) -> dict[str, int]:
    """Matrices that only dense layers before the last linear op read, with their fan-in."""
    nodes = [Node.from_proto(proto) for proto in program.model.graph.node]
    table = value_table(program.model)
    constants = {tensor.name for tensor in program.model.graph.initializer}
    made_of = origins(nodes, program.weights, constants)
    users = [node for node in nodes if not prepares(node, made_of)]
    linear = [n for n in users if n.op_type in LINEAR_OPS and weights_of(n, made_of)]
    fan_in: dict[str, int] = {}
    others: set[str] = set()
    for node in users:
        dense = node.op_type in DENSE_OPS and node not in linear[-1:]
        for index, name in enumerate(node.inputs):
            owners = made_of.get(name, frozenset())
            if dense and index < 2 and len(owners) == 1:
                shape = table[node.inputs[0]].shape
                summed = shape[0] if node.get("transA", 0) else shape[-1]
                fan_in.setdefault(next(iter(owners)), summed)
            else:
                others |= owners
    return {
        name: summed
        for name, summed in fan_in.items()
        if name not in others
        and program.weights[name].ndim == 2
        and program.weights[name].size >= SMALLEST
    }


def _trains(
    program: Program, layers: Mapping[str, int], compression: Compression
) -> tuple[TensorTrain, ...]:
    if not layers:
        raise ConfigError(
            f"{compression.text}: the model has no dense layer to compress: no Gemm or"
            f" MatMul before the last linear op has a weight of {SMALLEST} elements or more"
            " of its own; write 'all' to train it as it is"
        )
    fitted = []
    for name in layers:
        rows, columns = program.weights[name].shape
        fitted.append(fit(name, (rows, columns), compression.rank))
    trains = tuple(train for train in fitted if train.pays)
    if not trains:
        least = min(fitted, key=lambda train: train.elements / math.prod(train.shape))
        rows, columns = least.shape
        raise ConfigError(
            f"{compression.text}: no layer gets smaller by half: of {least.weight!r}"
            f" [{rows}, {columns}], the best of {len(fitted)}, the cores hold"
            f" {least.elements:,} numbers for {rows * columns:,}; take a smaller rank"
        )
    return trains


def _remark(trains: Sequence[TensorTrain], compression: Compression) -> str:
    sizes = [
        f"{t.weight} ({math.prod(t.shape):,} numbers to {t.elements:,})" for t in trains
    ]
    start = (
        "begin as close to the file's weights as that allows"
        if compression.from_file
        else "begin at random, whatever the file holds"
    )
    return (
        f"Trained through tensor trains of rank {compression.rank}, which {start}:"
        f" {listing(sizes)}."
    )
