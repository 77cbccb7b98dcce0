"""Where each weight of a stage lies in its flat buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edgetrain.manifest import ALIGNMENT, WeightSpec, view

Array = npt.NDArray[np.float32]
Layout = tuple[tuple[WeightSpec, ...], int, int]


def lay_out(
    weights: Mapping[str, tuple[int, ...]],
    trainable: frozenset[str],
    numbers: Mapping[str, int],
) -> Layout:
    """Place weights in one flat buffer, trainable ones first, each on its own cache line.

    Args:
        weights: shape of each weight, in the order wanted.
        trainable: the names the optimizer updates.
        numbers: of all weights in the whole model.

    Returns:
        The layout, the elements of its trainable part, and of the whole buffer.
    """
    offset = 0
    trainable_elements = 0
    layout = []
    for name in sorted(weights, key=lambda name: name not in trainable):
        kind = (tuple(weights[name]), offset, name in trainable)
        spec = WeightSpec(name, *kind, numbers[name])
        layout.append(spec)
        offset += -(-max(1, spec.elements) // ALIGNMENT) * ALIGNMENT
        if spec.trainable:
            trainable_elements = offset
    return tuple(layout), trainable_elements, offset


def placed(
    values: Mapping[str, Array], held: Sequence[str], trainable: frozenset[str]
) -> tuple[Layout, Array]:
    """The layout of some of a model's weights, and the buffer that holds them."""
    numbers = {name: number for number, name in enumerate(values)}
    layout = lay_out({name: values[name].shape for name in held}, trainable, numbers)
    buffer = np.zeros(layout[2], np.float32)
    for spec in layout[0]:
        view(buffer, spec)[...] = values[spec.name]
    return layout, buffer
