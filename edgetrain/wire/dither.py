"""Random bytes for stochastic rounding, the same for the same tensor of the same run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from edgetrain.wire.frame import Address

_WORD: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Dither:
    """Which bytes: those of one tensor in one run.

    A repeated run rounds as the first one did: the bytes hang on the run's seed and the
    tensor's place in training, not on the run's number or the plan's epoch.
    """

    seed: int
    address: Address

    def generator(self) -> np.random.Philox:
        """Counter-based, so that no state is kept from one tensor to the next.

        Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
        """
        a = self.address
        place = a.kind << 48 | a.stage << 32 | a.tensor << 16 | a.evaluation
        key = np.array([self.seed & _WORD, a.step], np.uint64)
        return np.random.Philox(key=key, counter=np.array([0, 0, a.microbatch, place]))


def draw(generator: np.random.Philox, count: int) -> npt.NDArray[np.uint8]:
    """The next `count` bytes, and up to seven more that are thrown away."""
    words = generator.random_raw(-(-count // 8)).astype("<u8", copy=False)
    return words.view(np.uint8)[:count]
