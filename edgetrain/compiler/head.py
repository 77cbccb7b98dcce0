"""The auxiliary head by which a stage learns from a loss at its own end."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from edgetrain.compiler.build import Attribute, GraphBuilder, Node
from edgetrain.compiler.loss import Criterion, attach
from edgetrain.compiler.part import Part
from edgetrain.compiler.ports import StageGraphs, make_port, result_ports
from edgetrain.compiler.vjp import vjp
from edgetrain.errors import GraphError, PlanError
from edgetrain.manifest import HEAD, GraphName, Role
from edgetrain.tensors import TensorSpec

Array = npt.NDArray[np.float32]

SEGMENTS: Final = 4  # along each axis of positions, and fewer where the head gets large
LARGEST: Final = 1 << 23  # elements of its weight
FLOAT: Final = "float32"
EPSILON: Final = 1e-5  # added to a variance

_FEATURES_SECOND: Final = frozenset(
    {
        "Conv", "ConvTranspose", "BatchNormalization", "InstanceNormalization",
        "GroupNormalization", "MaxPool", "AveragePool",
    }
)  # fmt: skip
_FEATURES_LAST: Final = frozenset({"MatMul", "Gemm", "LayerNormalization", "Gather"})


@dataclass(frozen=True, slots=True)
class Head:
    """Normalise, average over segments, flatten, one linear layer, the run's own loss.

    The values are normalised without parameters: tokens and vectors over their features,
    maps of convolutions over a whole sample. Then a head that starts at random, or comes
    from another data set, meets values of the scale it expects.

    Attributes:
        weight, bias: names of its weights.
        end: the value it reads.
        goal: what the model's own loss applies to; the head makes one alike.
        features_last: the end is [N, ..., features], not [N, features, ...].
        segments: along each axis of positions.

    Source: Belilovsky et al., Decoupled greedy learning of CNNs (arXiv:1901.08164), for
    stages that learn from auxiliary heads; Mono-Forward (arXiv:2501.09238) for a head that
    is one matrix. Ours: one head a stage, its segments, and its normalisation.
    """

    weight: str
    bias: str
    end: TensorSpec
    goal: TensorSpec
    features_last: bool
    segments: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return math.prod(self.goal.shape[1:])

    @property
    def channels(self) -> int:
        return self.end.shape[-1 if self.features_last else 1]

    @property
    def positions(self) -> tuple[int, ...]:
        shape = self.end.shape
        return shape[1:-1] if self.features_last else shape[2:]

    @property
    def features(self) -> int:
        """Inputs of the linear layer."""
        return self.channels * math.prod(self.segments)

    def draw(self, seed: int, stage: int) -> dict[str, Array]:
        """Weights to begin with: N(0, 1 / 3 features), small beside what it reads."""
        generator = np.random.default_rng((seed, stage))
        weight = generator.standard_normal((self.features, self.outputs))
        weight /= math.sqrt(3 * self.features)
        bias = np.zeros(self.outputs, np.float32)
        return {self.weight: weight.astype(np.float32), self.bias: bias}

    def attach(self, g: GraphBuilder, part: Part) -> tuple[list[Node], Criterion]:
        """Emit the head and the loss; the nodes are those before the loss."""
        start, shape = len(g.nodes), self.goal.shape
        g.describe(self.weight, FLOAT, (self.features, self.outputs))
        g.describe(self.bias, FLOAT, (self.outputs,))
        x = _pooled(g, self, _normalised(g, self))
        x = _emit(
            g, "Reshape", (shape[0], self.features), x, g.ints(shape[0], self.features)
        )
        x = _emit(g, "MatMul", (shape[0], self.outputs), x, self.weight)
        x = _emit(g, "Add", (shape[0], self.outputs), x, self.bias)
        if len(shape) != 2:
            x = _emit(g, "Reshape", shape, x, g.ints(*shape))
        nodes = g.nodes[start:]
        return nodes, attach(g, part.loss, x, part.loss_options)

    def add(self, graphs: StageGraphs, g: GraphBuilder, part: Part) -> Criterion:
        """Add the graph ``head``: the cotangent of the end without the stage itself."""
        nodes, criterion = self.attach(g, part)
        seeds = {criterion.target: criterion.cotangent}
        found = vjp(g, nodes, seeds, [self.end.name, self.weight, self.bias])
        ports = [
            make_port(g, criterion.loss, Role.LOSS),
            make_port(g, criterion.target, Role.OUTPUT),
            *result_ports(g, found, (self.end.name,), ()),
        ]
        graphs.add(g, GraphName.HEAD, ports, g.nodes)
        return criterion


def fit(g: GraphBuilder, part: Part, trained: Collection[str]) -> Head:
    """The head of a stage.

    Args:
        g: knows all primal values.
        part: the stage; not the last one.
        trained: its weights that are to learn.

    Raises:
        PlanError: the stage sends nothing that a head can read, or a head would be large.
        GraphError: the model uses the head's names.
    """
    prefix = f"{HEAD}{part.stage}/"
    names = f"{prefix}weight", f"{prefix}bias"
    if any(map(g.knows, names)):
        raise GraphError(
            f"values of the model are named {' and '.join(names)}, as the weights of a"
            f" head of stage {part.stage} would be: rename them"
        )
    end = _end(g, part, trained)
    last = _features_last(g, part.nodes, end.name)
    goal = g.spec(part.goal)
    for segments in (SEGMENTS, 2, 1):
        positions = end.shape[1:-1] if last else end.shape[2:]
        kept = tuple(min(segments, extent) for extent in positions)
        head = Head(*names, end, goal, last, kept)
        if head.features * head.outputs <= LARGEST:
            return head
    raise PlanError(
        f"a head at {end.name!r} would turn {head.features:,} numbers into {head.outputs:,}"
        f" with {head.features * head.outputs:,} weights, too many: cut where less crosses,"
        f" or set the gradient of stage {part.stage} to 'frozen'"
    )


def _end(g: GraphBuilder, part: Part, trained: Collection[str]) -> TensorSpec:
    """Of the values it makes and sends that learn and begin with samples, the last made."""
    reached = set(trained)
    for node in part.nodes:
        if not reached.isdisjoint(node.reads):
            reached.update(filter(None, node.outputs))
    samples = g.shape(part.goal)[:1]
    sent = {s.name: s for s in part.sends if s.dtype == FLOAT and s.shape[:1] == samples}
    made = [name for node in part.nodes for name in node.outputs]
    ends = [name for name in made if name in sent and name in reached]
    if not ends or len(sent[ends[-1]].shape) < 2:
        raise PlanError(
            f"stage {part.stage} has no place for a head: of what it makes and sends no"
            " float tensor [samples, ...] depends on its weights. Cut elsewhere, or set its"
            " gradient to 'frozen'"
        )
    return sent[ends[-1]]


def _features_last(g: GraphBuilder, nodes: Sequence[Node], end: str) -> bool:
    """Whether features lie on the last axis, as told by the nearest node that mixes them.

    Only nodes that leave all axes in place are passed on the way.
    """
    makers = {name: node for node in nodes for name in node.outputs}
    value = end
    while value in makers:
        node = makers[value]
        if node.op_type in _FEATURES_SECOND | _FEATURES_LAST:
            return node.op_type in _FEATURES_LAST
        alike = [n for n in node.inputs if n in makers and g.shape(n) == g.shape(value)]
        if not alike or node.op_type == "Transpose":
            break
        value = alike[0]
    return g.rank(end) < 4


def _normalised(g: GraphBuilder, head: Head) -> str:
    """(x - mean) / sqrt(variance + epsilon), over features or over a whole sample."""
    x, shape = head.end.name, head.end.shape
    axes = [len(shape) - 1] if head.features_last else [*range(1, len(shape))]
    rows = tuple(1 if axis in axes else n for axis, n in enumerate(shape))

    def mean(value: str) -> str:
        return _emit(g, "ReduceMean", rows, value, g.ints(*axes), keepdims=1)

    centred = _emit(g, "Sub", shape, x, mean(x))
    variance = mean(_emit(g, "Mul", shape, centred, centred))
    moved = _emit(g, "Add", rows, variance, g.scalar(EPSILON, x))
    return _emit(g, "Div", shape, centred, _emit(g, "Sqrt", rows, moved))


def _pooled(g: GraphBuilder, head: Head, x: str) -> str:
    """The means of equal segments of all axes of positions, by one product."""
    positions, cells = math.prod(head.positions), math.prod(head.segments)
    if positions == cells:
        return x
    parts = zip(head.positions, head.segments, strict=True)
    matrix = np.ones((1, 1), head.end.dtype)
    for extent, count in parts:
        matrix = np.kron(matrix, _means(extent, count)).astype(head.end.dtype)
    samples, channels = head.end.shape[0], head.channels
    if head.features_last:
        flat = (samples, positions, channels)
        x = _emit(g, "Reshape", flat, x, g.ints(*flat))
        return _emit(g, "MatMul", (samples, cells, channels), g.constant(matrix.T), x)
    flat = (samples, channels, positions)
    x = _emit(g, "Reshape", flat, x, g.ints(*flat))
    return _emit(g, "MatMul", (samples, channels, cells), x, g.constant(matrix))


def _means(extent: int, count: int) -> npt.NDArray[np.float64]:
    """[extent, count]: to multiply by it takes the mean of each of `count` segments."""
    matrix = np.zeros((extent, count))
    for segment in range(count):
        first, stop = segment * extent // count, -(-(segment + 1) * extent // count)
        matrix[first:stop, segment] = 1 / (stop - first)
    return matrix


def _emit(
    g: GraphBuilder,
    op_type: str,
    shape: Sequence[int],
    *inputs: str,
    **attributes: Attribute,
) -> str:
    """A node whose result has a known shape, so that it can be differentiated."""
    name = g(op_type, *inputs, **attributes)
    g.describe(name, g.dtype(inputs[0]), shape)
    return name
