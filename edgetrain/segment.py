"""The stretches of a stage that is run one at a time, and what is perturbed in them."""

from __future__ import annotations

import math

import msgspec


class Unit(msgspec.Struct, frozen=True):
    """A linear layer with its bias and normalisation: what noise is added after.

    Attributes:
        name: the value it makes.
        shape: of that value.
        mask: the value made of it by a rectifier, and the bound of that; empty: none.
            Where it is at a bound, nothing reaches the unit.
        cone: for each axis but the first, at which places of the stage's result each of
            the unit's places is felt: the first and the last, a pair a place. An empty
            axis: everywhere. Without axes: not known.
        layer: its number in the whole model, which names its noise: the same however the
            model is cut.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    mask: str = ""
    bound: float = math.inf
    cone: tuple[tuple[tuple[int, int], ...], ...] = ()
    layer: int = 0


class Segment(msgspec.Struct, frozen=True):
    """A stretch of a stage that is run by itself, so that little is held at once.

    Attributes:
        units: perturbed, or given a cotangent, here; none where all is exact.
        made: the values for the segments after it.
        push: the graph ``N/push``: values, tangents and noise to values and tangents; or,
            in the plain form, values and noise to values.
        contract: the graph ``N/contract``: values and the units' cotangents to values and
            gradients. Empty names: nothing is trained here.
        exact: `contract` takes the cotangents of what the stage sends instead.
    """

    units: tuple[Unit, ...]
    made: tuple[str, ...]
    push: str
    contract: str
    exact: bool = False
