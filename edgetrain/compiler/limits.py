"""What a model may ask for: bounds above any real one, against absurd files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from edgetrain.errors import GraphError

MAX_NODES: Final = 200_000  # with all functions written out
MAX_CALLS_DEEP: Final = 100  # functions that call each other
MAX_DEPTH: Final = 24  # graphs within graphs; protobuf writes 33 at most
MAX_RANK: Final = 64  # numpy's
MAX_WINDOW: Final = 1 << 20  # elements that one output of a pooling reads
# One value that is computed, for a microbatch, unless a weight is larger.
MAX_VALUE_BYTES: Final = 1 << 30
# The same where the inputs and weights that it is made of are small: then it may be at
# most so many times as large, and in any case so large.
MAX_GROWTH: Final = 1000
SMALL_VALUE_BYTES: Final = 1 << 26
# All that one run of a small model in the compiler needs at a time, its inputs aside.
MAX_RUN_BYTES: Final = 3 << 29
_LARGEST_ARRAY: Final = (1 << 63) - 1  # bytes that numpy can count


def check_extents(
    name: str, shape: Sequence[int], itemsize: int, most: int = MAX_VALUE_BYTES
) -> None:
    """Refuse a value before anything makes room for it.

    Args:
        name: of the value.
        shape: static.
        itemsize: bytes an element.
        most: bytes it may take.

    Raises:
        GraphError: the shape is none, or the whole is over `most`.
    """
    if not is_shape(shape, itemsize):
        raise GraphError(
            f"value {name!r} would have the shape {describe(shape)}, which no tensor has;"
            " the file is damaged, or a shape in it is for another input"
        )
    # An empty value may not have absurd extents either: what is made of it is not empty.
    nbytes = math.prod(max(1, extent) for extent in shape) * itemsize
    if nbytes > most:
        raise GraphError(
            f"value {name!r} of shape {describe(shape)} takes {nbytes / 1e9:.2g} GB, and"
            f" one value of this model may take {most / 1e9:.2g} GB: use a smaller"
            " microbatch or smaller inputs; if it is not meant to be that large, the file"
            " is damaged"
        )


def is_shape(shape: Sequence[int], itemsize: int) -> bool:
    """Whether numpy has arrays of that shape, which it asks of empty ones too."""
    extents = [max(1, extent) for extent in shape]
    return (
        len(shape) <= MAX_RANK
        and min(shape, default=0) >= 0
        and math.prod(extents) * itemsize <= _LARGEST_ARRAY
    )


def most_bytes(given: Sequence[int]) -> int:
    """What one value may take, where inputs and weights take `given` bytes."""
    grown = max(SMALL_VALUE_BYTES, MAX_GROWTH * sum(given))
    return max(min(MAX_VALUE_BYTES, grown), max(given, default=0))


def describe(shape: Sequence[int]) -> str:
    """The shape, cut short where its rank is absurd."""
    shown = ", ".join(map(str, shape[:8]))
    return f"[{shown}]" if len(shape) <= 8 else f"[{shown}, ...] of rank {len(shape)}"
