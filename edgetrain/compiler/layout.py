"""Where each weight of a stage lies in its flat buffer."""

from __future__ import annotations

from collections.abc import Mapping

from edgetrain.manifest import ALIGNMENT, WeightSpec


def lay_out(
    weights: Mapping[str, tuple[int, ...]],
    trainable: frozenset[str],
    numbers: Mapping[str, int],
) -> tuple[tuple[WeightSpec, ...], int, int]:
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
