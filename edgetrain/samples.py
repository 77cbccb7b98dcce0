"""Samples as arrays, and the order in which a run goes through them.

The coordinator and the agents compute that order apart from each other, so it depends on
nothing but its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgetrain.errors import DataError

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Samples:
    """A data set: row i of every array is sample i.

    Attributes:
        inputs: by the name of the model's input.
        labels: None where there are none, as on a device that only has the inputs.
        source: where it comes from, for messages.
        remarks: what was changed to make it fit, for the user to read.
    """

    inputs: Mapping[str, Array]
    labels: Array | None = None
    source: str = "data"
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        arrays = self.arrays()
        return min((len(array) for array in arrays.values()), default=0)

    def arrays(self) -> dict[str, Array]:
        """The inputs and, as ``labels``, the labels."""
        labels = {} if self.labels is None else {"labels": self.labels}
        return {**self.inputs, **labels}

    def take(self, rows: Rows) -> Samples:
        """The samples of those indices, copied, in that order."""
        inputs = {name: array[rows] for name, array in self.inputs.items()}
        labels = None if self.labels is None else self.labels[rows]
        return Samples(inputs, labels, self.source)


@lru_cache(maxsize=4)
def order(samples: int, *, epoch: int, seed: int, shuffle: bool) -> Rows:
    """The permutation of one pass over the data, read-only.

    Sorts raw Philox words: numpy fixes those for all versions, but not what its
    `permutation` makes of them.

    Args:
        samples: how many there are.
        epoch: the pass, from 0.
        seed: of the run, below 2^64.
        shuffle: False gives 0, 1, 2, ... in every epoch.

    Returns:
        int64 of shape [samples].
    """
    if shuffle:
        words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(samples)
        rows = np.argsort(words, kind="stable").astype(np.int64)
    else:
        rows = np.arange(samples, dtype=np.int64)
    rows.setflags(write=False)
    return rows


class BatchOrder(msgspec.Struct, frozen=True):
    """Which samples each microbatch of a run holds.

    An epoch's last samples that do not fill a batch are left out; shuffling makes them
    others in each epoch.

    Attributes:
        samples: how many there are; at least a batch.
        batch_size: samples a step, a multiple of `microbatches`.
        microbatches: equal parts of a batch.
        seed: of the run.
        shuffle: whether each epoch has its own order.
    """

    samples: int
    batch_size: int
    microbatches: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.samples < self.batch_size:
            raise DataError(
                f"{self.samples} samples do not fill one batch of {self.batch_size}:"
                " lower [train] batch_size or give more samples"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.batch_size

    @property
    def microbatch(self) -> int:
        """Samples in a microbatch."""
        return self.batch_size // self.microbatches

    def epoch(self, step: int) -> int:
        """The epoch, from 0, of a step of the whole run, from 0."""
        return step // self.steps_per_epoch

    def rows(self, step: int, microbatch: int) -> Rows:
        """Indices of the samples of one microbatch, int64 of shape [batch / microbatches].

        Args:
            step: of the whole run, from 0.
            microbatch: of the step, from 0.
        """
        permutation = order(
            self.samples, epoch=self.epoch(step), seed=self.seed, shuffle=self.shuffle
        )
        first = step % self.steps_per_epoch * self.batch_size + microbatch * self.microbatch
        return permutation[first : first + self.microbatch]


def evaluation_rows(samples: int, microbatch: int) -> Iterator[tuple[Rows, int]]:
    """Go through all samples once, in order, in microbatches of one static size.

    Yields:
        Indices, int64 of shape [microbatch], and how many of them count: the last
        microbatch is filled up by repeating the last sample.
    """
    for first in range(0, samples, microbatch):
        rows = np.arange(first, first + microbatch, dtype=np.int64)
        yield np.minimum(rows, samples - 1), min(microbatch, samples - first)
