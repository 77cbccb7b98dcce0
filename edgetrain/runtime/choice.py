"""Portable graphs or the fast path: whichever is faster, if both compute the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import numpy as np

from edgetrain.bundle import Bundle
from edgetrain.errors import EngineError
from edgetrain.runtime.heap import give_back
from edgetrain.runtime.stage import Stage, Timing, Trial

log = logging.getLogger(__name__)

# Of a tensor's norm. Rounding grows at kinks and in normalisation over few samples; wrong
# blocks are wrong by the norm itself.
TOLERANCE: Final = 1e-2
# Of an element: what is zero but for rounding cannot agree better.
FLOOR: Final = 1e-5


def choose(
    bundle: Bundle, block: int, make: Callable[[Bundle], Stage]
) -> tuple[Stage, Timing]:
    """Load a stage, on its fast path where that holds and pays.

    The engine's own kernels give wrong numbers, and no error, where they are used
    wrongly. So both versions run forward and backward on the same made-up values, and the
    fast path is taken only when every result agrees.

    Args:
        bundle: perhaps with a fast path.
        block: channels in a block of this device's layout; 0: it has none.
        make: loads a stage.

    Returns:
        The stage, warmed up, and its times.
    """
    chosen = _chosen(bundle, block, make)
    give_back()
    return chosen


def _chosen(
    bundle: Bundle, block: int, make: Callable[[Bundle], Stage]
) -> tuple[Stage, Timing]:
    stage = make(bundle)
    trial = stage.warm_up()
    fast = bundle.fast
    if fast is None or bundle.manifest.fast is None or bundle.manifest.fast.block != block:
        return stage, trial.timing
    del stage  # a small device need not hold both at once
    give_back()
    other = _better(make, fast, trial)
    if other is None:
        stage = make(bundle)
        return stage, stage.warm_up().timing
    return other


def _better(
    make: Callable[[Bundle], Stage], fast: Bundle, portable: Trial
) -> tuple[Stage, Timing] | None:
    """The fast path and its times, if it holds and pays."""
    try:
        stage = make(fast)
        trial = stage.warm_up()
    except EngineError as error:
        log.info("the fast path does not run here: %s", error)
        return None
    if not _agree(portable, trial):
        log.warning("the fast path computes something else here and is not used")
        return None
    faster = _seconds(trial.timing) < _seconds(portable.timing)
    return (stage, trial.timing) if faster else None


def _seconds(timing: Timing) -> float:
    return timing.forward_s + timing.backward_s


def _agree(a: Trial, b: Trial) -> bool:
    if a.results.keys() != b.results.keys():
        return False
    pairs = [(a.results[name], b.results[name]) for name in a.results]
    return all(
        x.shape == y.shape
        and np.linalg.norm(np.subtract(x, y))
        <= TOLERANCE * np.linalg.norm(x) + FLOOR * np.sqrt(x.size)
        for x, y in pairs
    )
