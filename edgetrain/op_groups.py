"""What a layer costs before any device is known: arithmetic, bytes and nodes by op group.

Operators of one group run at about one rate on one device. Device and coordinator both
know the groups: the one measures them, the other predicts by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec

from edgetrain.errors import ConfigError


class OpGroup(StrEnum):
    """Operators that one rate fits.

    dense: matrix products. pointwise: convolutions of one element that are matrix products
    too. depthwise: convolutions in groups. The plain ones are those that engines have no
    kernel of their own for: channels that fill no blocks, and a depthwise stride. pooling:
    over windows. reduction: over whole axes. transcendental: exp, erf, softmax and their
    like, which compute more than they move. optimizer: the update of the weights.
    """

    DENSE = "dense"
    CONVOLUTION = "convolution"
    CONVOLUTION_PLAIN = "convolution, plain"
    POINTWISE = "pointwise"
    DEPTHWISE = "depthwise"
    DEPTHWISE_PLAIN = "depthwise, plain"
    ELEMENTWISE = "elementwise"
    TRANSCENDENTAL = "transcendental"
    NORMALIZATION = "normalization"
    POOLING = "pooling"
    REDUCTION = "reduction"
    LAYOUT = "layout"
    RECURRENT = "recurrent"
    OPTIMIZER = "optimizer"


class Amount(msgspec.Struct, frozen=True):
    """Work of one group.

    Attributes:
        flop: a multiply-add counts as two.
        nbytes: read and written.
        nodes: operators that run, or steps of a recurrent one.
    """

    flop: float = 0.0
    nbytes: float = 0.0
    nodes: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.flop + other.flop, self.nbytes + other.nbytes, self.nodes + other.nodes
        )

    def times(self, share: float) -> Amount:
        return Amount(share * self.flop, share * self.nbytes, share * self.nodes)


NONE: Final = Amount()

Amounts = Mapping[OpGroup, Amount]


@dataclass(frozen=True, slots=True)
class LayerFeatures:
    """What a layer, or a stage of several, does for one microbatch.

    Attributes:
        forward: by group.
        backward: likewise, in terms of the forward: an operator that needs the gradient of
            its weights or of its input, but not both, counts half; one that no trained
            weight comes before counts nothing.
        trainable_elements: that the optimizer updates, once a step.
    """

    forward: Amounts = field(default_factory=dict)
    backward: Amounts = field(default_factory=dict)
    trainable_elements: int = 0

    def __add__(self, other: LayerFeatures) -> LayerFeatures:
        return LayerFeatures(
            _sum(self.forward, other.forward),
            _sum(self.backward, other.backward),
            self.trainable_elements + other.trainable_elements,
        )


def stage_features(layers: Iterable[LayerFeatures]) -> LayerFeatures:
    """Of a stage that is made of these layers."""
    return sum(layers, LayerFeatures())


def _sum(a: Amounts, b: Amounts) -> Amounts:
    return {group: a.get(group, NONE) + b.get(group, NONE) for group in {**a, **b}}


# Of one element: operations, and passes over buffers of 4 B, with the copy that undoes a
# step, as the runtime's optimizers make them.
_UPDATES: Final[Mapping[str, tuple[int, int]]] = {
    "sgd": (2, 7),
    "momentum": (4, 12),
    "adam": (12, 28),
    "adamw": (14, 31),
}


def update_amount(optimizer: str, elements: int) -> Amount:
    """Work of updating so many weights.

    Args:
        optimizer: ``"sgd"``, ``"momentum"`` (sgd with it), ``"adam"`` or ``"adamw"``.
        elements: trainable ones.

    Raises:
        ConfigError: an unknown optimizer.
    """
    if optimizer not in _UPDATES:
        raise ConfigError(
            f"optimizer {optimizer!r} is unknown: use one of {', '.join(_UPDATES)}"
        )
    flop, passes = _UPDATES[optimizer]
    return Amount(flop * elements, 4 * passes * elements, 1)
