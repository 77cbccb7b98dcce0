"""How fast each codec encodes and decodes, and how much shorter tensors become.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/codecs.py

MB/s of plain float32, on one core; the best of a few, as other work only slows it down.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from edgetrain.codec_spec import NAMES, CodecSpec
from edgetrain.tensors import TensorSpec
from edgetrain.wire.codec import decode, encode
from edgetrain.wire.dither import Dither
from edgetrain.wire.encoded import Encoded
from edgetrain.wire.frame import Address, Kind

HERE = Address(Kind.ACTIVATION, run=1, epoch=0, stage=1)


def tensors(side: int) -> dict[str, np.ndarray]:
    """What crosses cuts, more or less: dense, after a Relu, and nearly all zeros."""
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((side, side), np.float32)
    few = np.where(rng.random(dense.shape) < 0.01, dense, np.float32(0))
    return {"dense": dense, "relu": np.maximum(dense, 0), "1 % not zero": few}


def mb_per_s(work: Callable[[], object], nbytes: int, turns: int) -> float:
    best = min(seconds(work) for _ in range(turns))
    return nbytes / best / 1e6


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=1024, help="of the square tensor")
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args()
    print("| codec | tensor | encode MB/s | decode MB/s | shorter by |")
    print("|---|---|---:|---:|---:|")
    for name in NAMES:
        for what, array in tensors(arguments.side).items():
            row(name, what, array, arguments.turns)


def row(name: str, what: str, array: np.ndarray, turns: int) -> None:
    spec, dither = CodecSpec.parse(name), Dither(0, HERE)
    body = encode(spec, array, dither)
    if not isinstance(body, Encoded):
        return
    tensor = TensorSpec("t", array.dtype.name, array.shape)
    there = mb_per_s(lambda: encode(spec, array, dither), array.nbytes, turns)
    view = body.body.data
    back = mb_per_s(lambda: decode(body.codec, view, tensor), array.nbytes, turns)
    times = array.nbytes / body.nbytes
    print(f"| {spec} | {what} | {there:.0f} | {back:.0f} | {times:.2f} |")


if __name__ == "__main__":
    main()
