"""What a device must know of its stage: its tensors, its weights, its graphs' ports."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from edgetrain.losses import LossOptions
from edgetrain.tensors import TensorSpec

FORMAT: Final = 1
ALIGNMENT: Final = 16  # elements: each tensor of the flat buffer starts a 64-byte line
FAST: Final = "fast/"


class Role(StrEnum):
    """What a graph's input or output stands for."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    LABELS = "labels"
    COTANGENT = "cotangent"
    GRADIENT = "gradient"
    STASH = "stash"
    LOSS = "loss"
    STATISTIC = "statistic"
    OUTPUT = "output"


class GraphName(StrEnum):
    """The graphs a bundle may hold.

    forward: activations in, activations and stash out, as in training.
    backward: cotangents and stash in, gradients and upstream cotangents out.
    loss: the last stage, fused: activations and labels in, loss, gradients and upstream
        cotangents out.
    evaluate: as deployed: activations in, activations (or outputs and loss) out.
    criterion: model outputs and labels in, loss and the outputs' cotangents out.
    contract: the exact weight gradient of a stage's last linear op, from its stashed input
        and the downstream cotangent.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    LOSS = "loss"
    EVALUATE = "evaluate"
    CRITERION = "criterion"
    CONTRACT = "contract"


class Mode(StrEnum):
    """How a stage obtains its gradients."""

    VJP = "vjp"
    HYBRID = "hybrid"
    FROZEN = "frozen"


# The graphs that are run, or run once more, when a microbatch comes back.
RUN_IN_BACKWARD: Final[Mapping[Mode, tuple[GraphName, ...]]] = {
    Mode.VJP: (GraphName.LOSS, GraphName.BACKWARD),
    Mode.HYBRID: (GraphName.FORWARD, GraphName.CRITERION, GraphName.CONTRACT),
    Mode.FROZEN: (GraphName.LOSS, GraphName.BACKWARD),
}


class Port(msgspec.Struct, frozen=True):
    """One input or output of a graph.

    Attributes:
        name: the graph's own name for it.
        role: what it is.
        key: the tensor it belongs to: the weight of a gradient, the activation of a
            cotangent; equal to `name` otherwise.
    """

    name: str
    role: Role
    key: str
    dtype: str
    shape: tuple[int, ...]


class GraphSpec(msgspec.Struct, frozen=True):
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    sha256: str

    def ports(self, role: Role) -> Iterator[Port]:
        """Its outputs, then its inputs, that have the role."""
        return (port for port in (*self.outputs, *self.inputs) if port.role is role)


class WeightSpec(msgspec.Struct, frozen=True):
    """One weight in the flat float32 buffer, `offset` in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    trainable: bool

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class RunningStatistic(msgspec.Struct, frozen=True):
    """A BatchNormalization's running mean and variance, kept by the device.

    After each training forward of a microbatch: running = momentum * running +
    (1 - momentum) * batch, with the batch variance scaled by count / (count - 1).

    Source: ONNX BatchNormalization; the unbiased scale is PyTorch's and ours.
    """

    mean: str
    variance: str
    momentum: float
    count: int


class FastPath(msgspec.Struct, frozen=True):
    """The same graphs in terms of one engine's own kernels.

    A device that has them compares results before it uses them.

    Attributes:
        block: channels in a block of the engine's layout.
        graphs: as `Manifest.graphs`; their names in the bundle begin with ``fast/``.
    """

    block: int
    graphs: dict[str, GraphSpec]


class Manifest(msgspec.Struct, frozen=True):
    """Everything a device must know of its stage.

    Attributes:
        model_sha256: of the file the stage was cut from.
        microbatch: samples a microbatch, the graphs' static batch size.
        receives, sends: the activations that cross the stage's two cuts. What the stage
            does not compute itself it passes through unchanged.
        cotangents_in: the names in `sends` for which a cotangent comes back.
        cotangents_out: the names in `receives` for which one is sent upstream.
        labels: what the last stage compares with; None elsewhere.
        outputs: the model's outputs that the last stage makes and its `evaluate` returns,
            that of the loss first.
        loss: the loss's name; empty for all but the last stage.
        loss_options: what it was told; they also say which labels can be hit.
        weights: layout of the flat buffer: trainable ones first.
        elements, trainable_elements: length of the buffer and of its trainable part.
        fast: other graphs for one engine; None: there are none.
    """

    model_sha256: str
    stage: int
    stages: int
    microbatch: int
    mode: Mode
    receives: tuple[TensorSpec, ...]
    sends: tuple[TensorSpec, ...]
    cotangents_in: tuple[str, ...]
    cotangents_out: tuple[str, ...]
    labels: TensorSpec | None
    outputs: tuple[TensorSpec, ...]
    loss: str
    weights: tuple[WeightSpec, ...]
    elements: int
    trainable_elements: int
    statistics: tuple[RunningStatistic, ...]
    graphs: dict[str, GraphSpec]
    loss_options: LossOptions = LossOptions()
    fast: FastPath | None = None
    format: int = FORMAT

    @property
    def all_graphs(self) -> dict[str, GraphSpec]:
        """The graphs by their names in the bundle, those of the fast path too."""
        fast = self.fast.graphs if self.fast else {}
        return {**self.graphs, **{FAST + name: spec for name, spec in fast.items()}}

    @property
    def stash_bytes(self) -> int:
        """What a microbatch leaves behind between its forward and its backward."""
        kept = {
            port.name: TensorSpec(port.name, port.dtype, port.shape).nbytes
            for name in RUN_IN_BACKWARD[self.mode]
            if name in self.graphs
            for port in self.graphs[name].inputs
            if port.role in (Role.ACTIVATION, Role.STASH)
        }
        return sum(kept.values())

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


def lay_out(
    weights: Mapping[str, tuple[int, ...]], trainable: frozenset[str]
) -> tuple[tuple[WeightSpec, ...], int, int]:
    """Place weights in one flat buffer, trainable ones first, each on its own cache line.

    Args:
        weights: shape of each weight, in the order wanted.
        trainable: the names the optimizer updates.

    Returns:
        The layout, the elements of its trainable part, and of the whole buffer.
    """
    offset = 0
    trainable_elements = 0
    layout = []
    for name in sorted(weights, key=lambda name: name not in trainable):
        spec = WeightSpec(name, tuple(weights[name]), offset, name in trainable)
        layout.append(spec)
        offset += -(-max(1, spec.elements) // ALIGNMENT) * ALIGNMENT
        if spec.trainable:
            trainable_elements = offset
    return tuple(layout), trainable_elements, offset


def view(buffer: npt.NDArray[np.float32], spec: WeightSpec) -> npt.NDArray[np.float32]:
    """The weight's part of a flat buffer, shaped, sharing its memory."""
    return buffer[spec.offset : spec.offset + spec.elements].reshape(spec.shape)
