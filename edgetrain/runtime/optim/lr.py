"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from edgetrain.optimizer_spec import LRSpec


def learning_rate(spec: LRSpec, step: int) -> float:
    """The rate of a step, counted from 0, of a spec that passed its `check`.

    Linear and cosine stay at `final` from `total_steps` on.

    Warm-up step n uses base * (n + 1) / (warmup_steps + 1), so that no step is lost at
    rate 0 and the first one after the warm-up has the full rate.
    """
    if step < spec.warmup_steps:
        return spec.base * (step + 1) / (spec.warmup_steps + 1)
    return KINDS[spec.kind](spec, step - spec.warmup_steps)


def _progress(spec: LRSpec, step: int) -> float:
    return min(1.0, step / (spec.total_steps - spec.warmup_steps))


def _constant(spec: LRSpec, _step: int) -> float:
    return spec.base


def _step(spec: LRSpec, step: int) -> float:
    return float(spec.base * spec.gamma ** (step // spec.step_size))


def _linear(spec: LRSpec, step: int) -> float:
    return spec.base + (spec.final - spec.base) * _progress(spec, step)


def _cosine(spec: LRSpec, step: int) -> float:
    fall = 0.5 * (1.0 + math.cos(math.pi * _progress(spec, step)))
    return spec.final + (spec.base - spec.final) * fall


KINDS: Final[Mapping[str, Callable[[LRSpec, int], float]]] = {
    "constant": _constant,
    "cosine": _cosine,
    "step": _step,
    "linear": _linear,
}
