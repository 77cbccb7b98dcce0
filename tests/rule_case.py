"""What a case of a differentiation rule is, and numbers to fill it with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """One node on given inputs; integer inputs are constants unless `runtime`.

    `fixed` names inputs that are constants, or of float type and not differentiated.
    `random` marks an op that draws anew on every run, which has no differences.
    """

    op: str
    label: str
    inputs: tuple[np.ndarray | None, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    runtime: bool = False
    fixed: tuple[int, ...] = ()
    random: bool = False

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


def real(*shape: int, seed: int = 0) -> np.ndarray:
    """Distinct numbers in [-2, 2], none within 0.02 of another or of zero."""
    n = int(np.prod(shape))
    values = np.linspace(-2, 2, n + n % 2)[:n] if n > 1 else np.array([0.7])
    return np.random.default_rng(seed).permutation(values).reshape(shape).astype(np.float32)


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.abs(real(*shape, seed=seed)) + np.float32(0.4)).astype(np.float32)


def smooth(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)
