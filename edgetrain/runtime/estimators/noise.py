"""Noise that is regenerated instead of stored or sent: normals, and signs.

Any device that knows the key draws the same numbers, to the bit. numpy's own normal
sampler does not promise that: it goes through the platform's libm and may change between
releases. Here the random words come from Philox, which is fixed, and only operations that
IEEE 754 rounds exactly (+, -, *, /, sqrt) turn them into normals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

_BLOCK: Final = 1 << 14  # elements; even, as one 64-bit word makes two
_WORD: Final = (1 << 64) - 1

# Rational approximations of the inverse normal distribution, highest power first, good to
# 7 digits: algorithm AS 241 (Wichura, Applied Statistics 37, 1988), routine PPND7. Its
# third branch, for p below 1.4e-11, is out of reach of 32-bit uniforms.
_SPLIT: Final = np.float32(0.425)
_CENTRE: Final = np.float32(0.180625)
_A: Final = (59.109374720, 159.29113202, 50.434271938, 3.3871327179)
_B: Final = (67.187563600, 78.757757664, 17.895169469, 1.0)
_SHIFT: Final = np.float32(1.6)
_C: Final = (0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777)
_D: Final = (0.12021132975, 0.73700164250, 1.0)

# log(m) = 2 s (1 + s^2/3 + s^4/5 + ...) with s = (m - 1) / (m + 1)
_ATANH: Final = (2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0)
_LOG_2: Final = np.float32(math.log(2.0))
_SQRT_2: Final = np.float32(math.sqrt(2.0))


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Which noise. Two keys that differ anywhere give independent numbers.

    Attributes:
        seed: of the run.
        step: of the training.
        microbatch: within the step.
        layer: which tensor is perturbed.
        k: which of its perturbations.

    `seed`, `step` and `k` count modulo 2^64, `microbatch` and `layer` modulo 2^32.
    """

    seed: int
    step: int
    microbatch: int = 0
    layer: int = 0
    k: int = 0


def normal(key: NoiseKey, shape: tuple[int, ...]) -> Array:
    """Draw N(0, 1) noise, float32, the same on every machine for the same key.

    The first n numbers do not depend on how many are drawn. The largest magnitude is 6.34,
    where a true normal goes further once in 4e9 draws.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011 (Philox).
    """
    generator = _generator(key)
    out = np.empty(math.prod(shape), np.float32)
    for start in range(0, out.size, _BLOCK):
        part = out[start : start + _BLOCK]
        raw = generator.random_raw(-(-part.size // 2))
        words = raw.astype("<u8", copy=False).view("<u4")[: part.size]
        part[...] = from_words(words)
    return out.reshape(shape)


def signs(key: NoiseKey, shape: tuple[int, ...]) -> Array:
    """Draw -1 or 1 for each element, float32, one random bit each.

    For a directional derivative they serve as well as normals, E[v v'] = 1, with a
    variance that is a little smaller, and cost a tenth.
    """
    count = math.prod(shape)
    words = _generator(key).random_raw(-(-count // 64)).astype("<u8", copy=False)
    bits = np.unpackbits(words.view(np.uint8), count=count, bitorder="little")
    out = bits.astype(np.float32)
    out *= np.float32(2.0)
    out -= np.float32(1.0)
    return out.reshape(shape)


def _generator(key: NoiseKey) -> np.random.Philox:
    words = np.array([key.seed & _WORD, key.step & _WORD], np.uint64)
    place = (key.microbatch & 0xFFFFFFFF) << 32 | key.layer & 0xFFFFFFFF
    counter = np.array([0, 0, key.k & _WORD, place], np.uint64)
    return np.random.Philox(key=words, counter=counter)


def from_words(words: npt.NDArray[np.uint32]) -> Array:
    """Turn 32 random bits into one normal each, by the inverse distribution function.

    The lowest bit is the sign; the others, m, give the tail probability (m + 1/2) / 2^32,
    which keeps full precision far out where one uniform in (0, 1) loses it near 1.
    """
    tail = (words >> np.uint32(1)).astype(np.int32).astype(np.float32)
    tail += np.float32(0.5)
    tail *= np.float32(2.0**-32)
    q = np.float32(0.5) - tail
    r = _CENTRE - q * q
    z = q * _polynomial(_A, r) / _polynomial(_B, r)
    outer = np.flatnonzero(q > _SPLIT)
    r = np.sqrt(-_log(tail[outer])) - _SHIFT
    z[outer] = _polynomial(_C, r) / _polynomial(_D, r)
    bits = z.view(np.uint32)
    bits ^= words << np.uint32(31)
    return z


def _log(x: Array) -> Array:
    """Natural logarithm, to a few units in the last place."""
    mantissa, exponent = np.frexp(x)
    mantissa *= _SQRT_2  # to [0.71, 1.41), where the series is short; half a power too many
    s: Array = np.divide(mantissa - np.float32(1.0), mantissa + np.float32(1.0))
    power = exponent.astype(np.float32) - np.float32(0.5)
    return power * _LOG_2 + s * _polynomial(_ATANH, s * s)


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    """Horner's rule in float32, highest power first."""
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value *= x
        value += coefficient
    return value
