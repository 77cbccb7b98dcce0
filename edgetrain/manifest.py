"""What a device must know of its stage: its tensors, its weights, its graphs' ports."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from edgetrain.estimator_spec import EstimatorSpec
from edgetrain.losses import LossOptions
from edgetrain.rays import Rays
from edgetrain.segment import Segment
from edgetrain.tensors import TensorSpec

FORMAT: Final = 1
ALIGNMENT: Final = 16  # elements: each tensor of the flat buffer starts a 64-byte line
FAST: Final = "fast/"
HEAD: Final = "head/"  # what the weights of heads are named with
LOWEST: Final = -128  # of a quantised weight, in steps of its grid
HIGHEST: Final = 127


class Role(StrEnum):
    """What a graph's input or output stands for."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    LABELS = "labels"
    COTANGENT = "cotangent"
    TANGENT = "tangent"
    NOISE = "noise"
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
    head: the stage's end and labels in; loss, scores, gradients of the head's weights and
        the cotangent of the end out.

    A segment has graphs of its own; see `Segment`.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    LOSS = "loss"
    EVALUATE = "evaluate"
    CRITERION = "criterion"
    HEAD = "head"


class Mode(StrEnum):
    """How a stage obtains its gradients."""

    VJP = "vjp"
    IDENTITY = "identity"
    HYBRID = "hybrid"
    FORWARD_GRADIENT = "forward_gradient"
    SPSA = "spsa"
    LOCAL_VJP = "local_vjp"
    LOCAL = "local"
    FROZEN = "frozen"


# The modes whose noise is carried on to the loss, through stages of the same mode.
CARRYING: Final = frozenset((Mode.FORWARD_GRADIENT, Mode.SPSA))
# The modes whose stages run segment by segment and never a backward graph.
SEGMENTED: Final = frozenset((Mode.IDENTITY, Mode.HYBRID, Mode.LOCAL)) | CARRYING
# The modes whose stages learn from a loss of their own: no cotangent of what they make
# comes from downstream, none goes upstream.
DECOUPLED: Final = frozenset((Mode.LOCAL_VJP, Mode.LOCAL))


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
    """A graph from outside: its ports, its hash, and what a run takes beside its inputs."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    sha256: str
    peak_bytes: int = 0  # temporaries and outputs at once, gradients apart; 0: not known

    def ports(self, role: Role) -> Iterator[Port]:
        """Its outputs, then its inputs, that have the role."""
        return (port for port in (*self.outputs, *self.inputs) if port.role is role)


class WeightSpec(msgspec.Struct, frozen=True):
    """One weight in the flat float32 buffer, `offset` in elements.

    Attributes:
        layer: its number in the whole model, which names its noise.
        lsb: where graphs round it to multiples of a step, that step: one for the tensor,
            or one for each place along `lsb_axis`. Empty: it is used as it is.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    trainable: bool
    layer: int = 0
    lsb: tuple[float, ...] = ()
    lsb_axis: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def steps(self) -> npt.NDArray[np.float32]:
        """Its `lsb` in a shape that goes with its own."""
        steps = np.asarray(self.lsb, np.float32)
        if steps.size <= 1:
            return steps.reshape(())
        return steps.reshape(
            [steps.size if i == self.lsb_axis else 1 for i in range(len(self.shape))]
        )


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
        labels: what the last stage, or a stage's own head, compares with; None elsewhere.
        outputs: the model's outputs that the last stage makes and its `evaluate` returns,
            that of the loss first.
        loss: the loss's name; empty for all but the last stage.
        loss_options: what it was told; they also say which labels can be hit.
        weights: layout of the flat buffer: trainable ones first.
        elements, trainable_elements: length of the buffer and of its trainable part.
        fast: other graphs for one engine; None: there are none.
        segments: in order, where gradients are estimated.
        skip: the received activation whose cotangent is that of what is sent (identity).
        estimator: how.
        rays: what crosses the cuts besides, and comes back in place of cotangents.
        inner: how a stage with segments spreads the cotangent of its end: ``hybrid`` or
            ``identity``. None where there are none.
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
    segments: tuple[Segment, ...] = ()
    skip: str = ""
    estimator: EstimatorSpec = EstimatorSpec()
    rays: Rays = Rays()
    inner: Mode | None = None
    format: int = FORMAT

    @property
    def all_graphs(self) -> dict[str, GraphSpec]:
        """The graphs by their names in the bundle, those of the fast path too."""
        fast = self.fast.graphs if self.fast else {}
        return {**self.graphs, **{FAST + name: spec for name, spec in fast.items()}}

    @property
    def downstream(self) -> tuple[TensorSpec, ...]:
        """All that a training forward sends."""
        return self.sends if self.is_last else (*self.sends, *self.rays.made)

    @property
    def quantised(self) -> bool:
        """Whether its forward, as it is trained and evaluated, is one of integers."""
        return self.mode is Mode.HYBRID and self.estimator.quantised

    @property
    def stash_bytes(self) -> int:
        """What a microbatch leaves behind between its forward and its backward."""
        return sum(spec.nbytes for spec in self.stashed)

    @property
    def stashed(self) -> tuple[TensorSpec, ...]:
        """What is kept of a microbatch until it comes back.

        Where gradients are exact, what their graph takes; else the activations received
        from which the stage, or what learns of it, is run again, and what the loss applies
        to, with its rays.
        """
        names: tuple[str, ...] = (GraphName.LOSS, GraphName.BACKWARD)
        if self.mode in CARRYING:
            names = (GraphName.CRITERION, *(s.contract for s in self.segments))
        elif self.mode in SEGMENTED:
            pushed = (name for s in self.segments for name in (s.push, s.contract))
            names = (GraphName.CRITERION, GraphName.HEAD, GraphName.FORWARD, *pushed)
        made = {name for segment in self.segments for name in segment.made}
        kept = {
            port.name: TensorSpec(port.name, port.dtype, port.shape)
            for name in names
            if name in self.graphs
            for port in self.graphs[name].inputs
            if port.role in (Role.ACTIVATION, Role.STASH)
            and (port.name not in made or name == GraphName.HEAD)
        }
        return (*kept.values(), *(self.rays.made if self.is_last else ()))

    @property
    def exact(self) -> frozenset[str]:
        """The weights whose gradient is exact where that of others is estimated."""
        names = [s.contract for s in self.segments if s.exact and s.contract]
        names += [GraphName.HEAD] if GraphName.HEAD in self.graphs else []
        ports = (port for n in names for port in self.graphs[n].ports(Role.GRADIENT))
        return frozenset(port.key for port in ports)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


def view(buffer: npt.NDArray[np.float32], spec: WeightSpec) -> npt.NDArray[np.float32]:
    """The weight's part of a flat buffer, shaped, sharing its memory."""
    return buffer[spec.offset : spec.offset + spec.elements].reshape(spec.shape)
