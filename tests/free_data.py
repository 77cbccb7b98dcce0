"""The data that backprop-free training is tested on: digits, MNIST and its shifts, watches.

All splits are fixed. Real data that is not shipped skips the test that asks for it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from inputs import cached

ASSET = Path(__file__).resolve().parent.parent / "coordinator" / "assets" / "digits.npz"
DIGITS_TRAIN = 1400
MNIST_PRETRAIN, MNIST_TRAIN = 7000, 8000  # ends: 7,000 to pretrain, 1,000 to adapt
ROTATION_DEGREES = 45.0
MNIST_MEAN, MNIST_DEVIATION = np.float32(0.1307), np.float32(0.3081)
HELD_OUT_PEOPLE = (0, 4, 8)


class Samples(NamedTuple):
    """`x` float32 [n, ...], `labels` int64 [n]."""

    x: np.ndarray
    labels: np.ndarray

    def part(self, rows: slice | np.ndarray) -> Samples:
        return Samples(self.x[rows], self.labels[rows])

    def flat(self) -> Samples:
        return Samples(self.x.reshape(len(self.x), -1), self.labels)

    def standardised(self) -> Samples:
        """Pixels of MNIST with mean 0 and deviation 1."""
        return Samples((self.x - MNIST_MEAN) / MNIST_DEVIATION, self.labels)

    def rotated(self, degrees: float = ROTATION_DEGREES) -> Samples:
        return Samples(rotate(self.x, degrees), self.labels)

    def inverted(self) -> Samples:
        return Samples(1 - self.x, self.labels)


@cache
def digits() -> tuple[Samples, Samples]:
    """The UCI digits as [n, 64] in 0 ... 1: 1,400 to train, 397 to test."""
    with np.load(ASSET) as arrays:
        x = arrays["image"].reshape(-1, 64).astype(np.float32) / 16
        labels = arrays["labels"].astype(np.int64)
    rows = np.random.default_rng(0).permutation(len(x))
    everything = Samples(x[rows], labels[rows])
    return everything.part(slice(DIGITS_TRAIN)), everything.part(slice(DIGITS_TRAIN, None))


@cache
def _mnist() -> Samples:
    """10,000 images [n, 1, 28, 28] in 0 ... 1, in the cache's shuffled order."""
    with np.load(cached("mnist10k.npz")) as arrays:
        return Samples(arrays["x"] / np.float32(255), arrays["labels"])


def mnist() -> tuple[Samples, Samples]:
    """8,000 images to train, 2,000 to test."""
    return _mnist().part(slice(MNIST_TRAIN)), _mnist().part(slice(MNIST_TRAIN, None))


def mnist_pretraining() -> Samples:
    """The first 7,000 of the training images: all that a pretrained network has seen."""
    return _mnist().part(slice(MNIST_PRETRAIN))


def mnist_adaptation() -> tuple[Samples, Samples]:
    """The other 1,000 training images, and the 2,000 to test."""
    _, test = mnist()
    return _mnist().part(slice(MNIST_PRETRAIN, MNIST_TRAIN)), test


@cache
def _watch() -> tuple[Samples, np.ndarray, np.ndarray]:
    """Windows [n, 6, 100] of 7 exercises, the person of each, and its half."""
    with np.load(cached("watch.npz")) as arrays:
        samples, person = Samples(arrays["x"], arrays["labels"]), arrays["person"]
    with np.load(cached("watch_halves.npz")) as arrays:
        return samples, person, arrays["half"]


def watch_pretraining() -> Samples:
    """All windows of the seven people who are not held out."""
    samples, person, _ = _watch()
    return samples.part(~np.isin(person, HELD_OUT_PEOPLE))


def watch_adaptation(person: int) -> tuple[Samples, Samples]:
    """Windows of one person: of the first halves of the recordings, of the second ones."""
    samples, people, half = _watch()
    return tuple(samples.part((people == person) & (half == h)) for h in (0, 1))


def rotate(images: np.ndarray, degrees: float) -> np.ndarray:
    """Turn images [n, channels, side, side] anticlockwise; bilinear, zero outside."""
    side = images.shape[-1]
    middle = (side - 1) / 2
    angle = np.deg2rad(degrees)
    down, right = np.mgrid[:side, :side] - middle
    row = np.cos(angle) * down + np.sin(angle) * right + middle
    column = np.cos(angle) * right - np.sin(angle) * down + middle
    top, left = np.floor(row).astype(int), np.floor(column).astype(int)
    turned = np.zeros(images.shape, np.float64)
    for r in (top, top + 1):
        for c in (left, left + 1):
            inside = (r >= 0) & (r < side) & (c >= 0) & (c < side)
            weight = (1 - np.abs(row - r)) * (1 - np.abs(column - c)) * inside
            turned += weight * images[..., r.clip(0, side - 1), c.clip(0, side - 1)]
    return turned.astype(np.float32)
