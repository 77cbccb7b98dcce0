"""Arithmetic on flat float32 buffers: scaling, norms, and walking in blocks.

An optimizer makes several passes over its buffers. Walking in blocks that fit the cache
reads each of them from memory once, and lets the scratch be of one block.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from edgetrain.errors import ConfigError

Buffer = npt.NDArray[np.float32]
State = dict[str, npt.NDArray[np.generic]]

BLOCK: Final = 1 << 15  # elements: 128 KiB, three of which fit a second-level cache
_CLIP_EPSILON: Final = 1e-6


def blocks(elements: int) -> tuple[slice, ...]:
    """Slices of at most BLOCK elements that cover a buffer."""
    return tuple(
        slice(start, min(start + BLOCK, elements)) for start in range(0, elements, BLOCK)
    )


def scale_(gradient: Buffer, factor: float) -> None:
    """Multiply in place; infinity times 0 is NaN, without a warning."""
    with np.errstate(invalid="ignore"):
        np.multiply(gradient, np.float32(factor), out=gradient)


def square_sum(gradient: Buffer) -> float:
    """Sum of squares, accumulated in float64.

    A stage sends it to be added to the others' for the norm of the whole model.
    """
    parts = (gradient[block].astype(np.float64) for block in blocks(gradient.size))
    return math.fsum(float(np.dot(part, part)) for part in parts)


def clip_factor(total_square_sum: float, clip_norm: float) -> float:
    """What to scale the gradient by, so that its global norm is at most `clip_norm`.

    Args:
        total_square_sum: of the gradients of all stages together.
        clip_norm: the largest norm allowed.

    Returns:
        A factor of at most 1; NaN when the sum is NaN, so that it cannot pass unseen, and
        0 when it is infinite.

    Source: torch.nn.utils.clip_grad_norm_, with its epsilon.
    """
    if math.isnan(total_square_sum):
        return math.nan
    return min(1.0, clip_norm / (math.sqrt(total_square_sum) + _CLIP_EPSILON))


def restore(target: State, state: State) -> None:
    """Copy a saved optimizer state into the live one.

    Raises:
        ConfigError: it is of another optimizer or of another size.
    """
    expected = {name: (array.shape, array.dtype.name) for name, array in target.items()}
    found = {name: (array.shape, array.dtype.name) for name, array in state.items()}
    if expected != found:
        raise ConfigError(
            f"the saved optimizer state holds {found}, this run's optimizer needs"
            f" {expected}: resume with the optimizer and the trainable weights of the run"
            " that saved it"
        )
    for name, array in target.items():
        array[...] = state[name]
