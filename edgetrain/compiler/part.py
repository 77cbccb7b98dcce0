"""One stage before it is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from edgetrain.compiler.build import Node
from edgetrain.compiler.stash import Keep
from edgetrain.estimator_spec import DEFAULT, EstimatorSpec
from edgetrain.losses import LossOptions
from edgetrain.manifest import CARRYING, DECOUPLED, Mode
from edgetrain.tensors import TensorSpec


@dataclass(frozen=True)
class Part:
    """A stretch of a program's nodes and what it has to do.

    Attributes:
        stage, stages: its number, and how many there are.
        mode: how it obtains its gradients.
        nodes: in order.
        receives, sends: the values that cross its two ends.
        influenced: values that some trained weight has an influence on; where noise is
            carried on, of the stages alone that do so.
        loss, loss_options: name of the loss, and what it is told.
        goal: what the loss applies to, whichever stage makes it.
        target: the same in the last stage; empty in all others.
        output: the model's output that is, or follows from, `target`.
        batch_statistics: BatchNormalization uses its microbatch's statistics.
        keep: what its forward hands to its backward.
        block: of the device's own layout, for a fast path; 0: portable graphs only.
        estimator: how gradients are estimated, where they are.
        returns: cotangents go to the stage before, where they are wanted.
        first: number of its first node in the whole model.
        samples: of a microbatch.
        seed: of the weights that its own head begins with.
        ranges: of the activations that a quantised forward rounds.
    """

    stage: int
    stages: int
    mode: Mode
    nodes: tuple[Node, ...]
    receives: tuple[TensorSpec, ...]
    sends: tuple[TensorSpec, ...]
    influenced: frozenset[str]
    loss: str
    loss_options: LossOptions
    goal: str
    target: str
    output: str
    batch_statistics: bool
    keep: Keep = Keep.LEAST
    block: int = 0
    estimator: EstimatorSpec = DEFAULT
    returns: bool = True
    first: int = 0
    samples: int = 1
    seed: int = 0
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def made(self) -> frozenset[str]:
        """Every value its nodes make."""
        return frozenset(name for node in self.nodes for name in node.outputs if name)

    @cached_property
    def read(self) -> tuple[str, ...]:
        """Every value its nodes read, in order of first use."""
        return tuple(dict.fromkeys(n for node in self.nodes for n in node.inputs if n))

    @property
    def quantised(self) -> bool:
        """Whether its forward, as it is trained and evaluated, is one of integers."""
        return self.mode is Mode.HYBRID and self.estimator.quantised

    @cached_property
    def wanted_upstream(self) -> tuple[str, ...]:
        """The received values whose cotangent a weight upstream needs and gets here."""
        if self.mode in DECOUPLED or not self.returns:
            return ()
        return tuple(spec.name for spec in self.moved(self.receives))

    def ends(self, cotangents_in: Iterable[str]) -> tuple[str, ...]:
        """The values of its own making whose cotangents it gets, or whose rays it sends."""
        if self.target:
            return (self.target,)
        carried = (spec.name for spec in self.moved(self.sends))
        names = carried if self.mode in CARRYING else cotangents_in
        return tuple(name for name in names if name in self.made)

    def outputs(self, model: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Those of the model's that the last stage makes, the one of the loss first."""
        if not self.target:
            return ()
        made = [s for s in model if s.name in self.made]
        return tuple(sorted(made, key=lambda spec: spec.name != self.output))

    def moved(self, values: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Those of some values that trained weights can move by a little."""
        return tuple(s for s in values if s.is_float and s.name in self.influenced)
