"""A tensor as a codec has written it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Encoded(NamedTuple):
    """A tensor in another form than its own: of which type it was, the codec, the bytes."""

    dtype: str
    codec: int
    body: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Of the bytes."""
        return self.body.nbytes
