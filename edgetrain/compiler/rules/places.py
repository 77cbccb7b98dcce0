"""Index tuples, as GatherND and ScatterND have them, as rows of a matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgetrain.compiler.build import Array, GraphBuilder
from edgetrain.compiler.rules.shaping import Shape, reshape


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a value that is seen as a matrix.

    Attributes:
        name: int64 values of shape [count], each in [0, extent).
        count: how many rows are named; one may be named twice.
        extent: rows the matrix has.
    """

    name: str
    count: int
    extent: int


def flat_rows(g: GraphBuilder, indices: str, shape: Shape, batch_dims: int = 0) -> Rows:
    """The rows that index tuples name, negative indices resolved.

    Args:
        g: where to emit.
        indices: [*batch, ..., k], each tuple indexing the k axes after the batch's.
        shape: of the value that is indexed; its first `batch_dims + k` axes become the
            rows, the others the columns.
        batch_dims: leading axes that value and indices share.
    """
    given = g.shape(indices)
    depth = given[-1]
    indexed = shape[batch_dims : batch_dims + depth]
    extent = math.prod(shape[: batch_dims + depth])
    count = math.prod(given[:-1])
    strides = np.array([math.prod(indexed[i + 1 :]) for i in range(depth)], np.int64)
    first = _batch_starts(given[:-1], batch_dims, math.prod(indexed))
    if g.is_constant(indices):
        tuples = g.value(indices).reshape(count, depth) % np.array(indexed, np.int64)
        return Rows(g.constant(tuples @ strides + first, "int64"), count, extent)
    wrapped = g("Mod", reshape(g, indices, (count, depth)), g.ints(*indexed))
    steps = g("Mul", wrapped, g.constant(strides))
    rows = g("ReduceSum", steps, g.ints(1), keepdims=0)
    return Rows(g("Add", rows, g.constant(first)), count, extent)


def _batch_starts(tuples: Shape, batch_dims: int, size: int) -> Array:
    """For each index tuple, the first row of its batch."""
    batches = math.prod(tuples[:batch_dims])
    starts = np.arange(batches, dtype=np.int64) * size
    return np.repeat(starts, math.prod(tuples[batch_dims:]))
