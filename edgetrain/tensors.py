"""What every part says of a tensor: its name, type and shape."""

from __future__ import annotations

import math

import msgspec
import numpy as np


class TensorSpec(msgspec.Struct, frozen=True):
    """A named tensor of static shape; `dtype` is numpy's name, such as ``float32``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * np.dtype(self.dtype).itemsize

    @property
    def is_float(self) -> bool:
        return np.dtype(self.dtype).kind == "f"

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"
