"""Which values the operands of linear ops are rounded to, where 8 bits are all there is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from edgetrain.compiler.build import Node
from edgetrain.compiler.origin import origins
from edgetrain.compiler.part import Part
from edgetrain.compiler.program import Program
from edgetrain.compiler.values import constants, value_table
from edgetrain.manifest import HIGHEST, WeightSpec

Array = npt.NDArray[Any]
Range = tuple[float, float]
Ranges = Mapping[str, Range]

LINEAR: Final = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
HEADROOM: Final = 1.25  # the ends of a grid, over the largest weight at the start
SMALLEST: Final = 1 / 16  # of a tensor's largest weight: what a channel's range is at least
STEPS: Final = 255  # of an activation's range


@dataclass(frozen=True, slots=True)
class Grid:
    """The values a quantised weight can take: -128 to 127 times its scale.

    Attributes:
        scales: one for the tensor, or one for each place along `axis`.
    """

    scales: tuple[float, ...]
    axis: int = 0


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What a stage's forward is quantised by.

    Attributes:
        grids: of its weights, and of other constants that its linear ops read.
        ranges: of its activations.
        fixed: values that depend on no data: weights, constants, and what is made of them.
    """

    grids: Mapping[str, Grid]
    ranges: Ranges
    fixed: frozenset[str]


def observed(program: Program) -> list[str]:
    """The values whose ranges must be known: what linear ops read that depends on data."""
    nodes = [Node.from_proto(proto) for proto in program.model.graph.node]
    table, held = value_table(program.model), constants(program.model)
    fixed = origins(nodes, program.weights, held).keys() | held.keys()
    found = (name for node in nodes for name in activations(node, fixed))
    return [name for name in dict.fromkeys(found) if table[name].dtype == "float32"]


def quantisation(
    part: Part, values: Mapping[str, Array], made_of: Mapping[str, frozenset[str]]
) -> Quantisation | None:
    """What a stage is quantised by, if it is; see `settle`."""
    if not part.quantised:
        return None
    return settle(part.nodes, values, made_of, part.ranges)


def settle(
    nodes: Sequence[Node],
    values: Mapping[str, Array],
    made_of: Mapping[str, frozenset[str]],
    ranges: Ranges,
) -> Quantisation:
    """Choose the grids of what the linear ops of `nodes` read, from its present values.

    A grid ends at `HEADROOM` times the largest weight, so that weights can grow. It has a
    scale for each output channel where the op reads the weight as it is or transposed.

    Args:
        nodes: of a stage, in execution order.
        values: of weights and constants.
        made_of: the weights of each value that depends on nothing else.
        ranges: of the activations.
    """
    makers = {name: node for node in nodes for name in node.outputs}
    fixed = frozenset(made_of.keys() | values.keys())
    axes: dict[str, set[int | None]] = {}
    for node in nodes:
        if all(name in fixed for name in node.inputs[:2]):
            continue
        for index in operands(node):
            axis = _output_axis(node, index)
            for name, where in _sources(node.inputs[index], axis, makers, made_of, values):
                axes.setdefault(name, set()).add(where)
    grids = {
        name: _grid(values[name], wheres.pop() if len(wheres) == 1 else None)
        for name, wheres in axes.items()
        if values[name].dtype == np.float32
    }
    return Quantisation(grids, ranges, fixed)


def on_grids(
    layout: tuple[WeightSpec, ...], by: Quantisation | None
) -> tuple[WeightSpec, ...]:
    """The same weights, those with a grid told of it."""
    if by is None:
        return layout
    told = []
    for spec in layout:
        grid = by.grids.get(spec.name, Grid(()))
        told.append(replace(spec, lsb=grid.scales, lsb_axis=grid.axis))
    return tuple(told)


def scale_of(bounds: Range) -> tuple[Array, Array]:
    """Scale and zero point of an activation of that range; 0 is always one of its values.

    A padding of zeros is then exact.
    """
    low, high = min(bounds[0], 0.0), max(bounds[1], 0.0)
    scale = np.float32((high - low) / STEPS or 1 / STEPS)
    return np.asarray(scale), np.asarray(np.rint(-low / scale), np.uint8)


def operands(node: Node) -> range:
    """Which inputs are multiplied with each other."""
    return range(2) if node.op_type in LINEAR and not node.domain else range(0)


def activations(node: Node, fixed: Collection[str]) -> list[str]:
    return [node.inputs[i] for i in operands(node) if node.inputs[i] not in fixed]


def _output_axis(node: Node, index: int) -> int | None:
    """The axis of an op's output channels in its second operand, perhaps from the end."""
    if index == 0:
        return None  # a scale a row is more than integer kernels take
    match node.op_type:
        case "Conv":
            return 0
        case "ConvTranspose":
            return 1
        case "Gemm":
            return 0 if node.get("transB", 0) else 1
        case _:
            return -1


def _sources(
    name: str,
    axis: int | None,
    makers: Mapping[str, Node],
    made_of: Mapping[str, frozenset[str]],
    values: Mapping[str, Array],
) -> Iterator[tuple[str, int | None]]:
    """The weights behind an operand, each with its axis of output channels or None."""
    if name in values:
        rank = values[name].ndim
        per_channel = axis is not None and rank > 1
        yield name, (axis % rank if axis is not None and per_channel else None)
        return
    maker = makers.get(name)
    turned = maker is not None and maker.op_type == "Transpose"
    if maker is not None and turned and axis is not None and maker.inputs[0] in values:
        rank = values[maker.inputs[0]].ndim
        perm = maker.get("perm", list(range(rank))[::-1])
        yield maker.inputs[0], perm[axis % rank]
        return
    yield from ((w, None) for w in sorted(made_of.get(name, ())) if values[w].ndim > 1)


def _grid(value: Array, axis: int | None) -> Grid:
    peaks = np.abs(value, dtype=np.float64)
    others = tuple(i for i in range(value.ndim) if i != axis)
    peaks = np.atleast_1d(peaks.max(axis=None if axis is None else others))
    peaks = np.maximum(peaks, SMALLEST * peaks.max() or 1.0)
    scales = (peaks * HEADROOM / HIGHEST).astype(np.float32)
    return Grid(tuple(map(float, scales)), axis or 0)
