"""Schedules that update once a step, after every microbatch: same weights as one process.

They differ only in the warm-up: how many microbatches a stage takes forward before it
alternates. A longer warm-up hides the hops between stages and costs stash.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgetrain.schedules.actions import Action, Op


def gpipe(stage: int, stages: int, microbatches: int) -> Iterator[Action]:  # noqa: ARG001 - the signature all schedules share
    """Yield all forwards, then all backwards: every microbatch is stashed.

    Source: Huang et al., GPipe, NeurIPS 2019. The paper takes the microbatches back in
    reverse; we keep their order, so that gradients are summed in the same order under
    every schedule and the weights agree bit for bit.
    """
    return _alternate(stage, microbatches, warmup=microbatches)


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """Yield 1F1B: warm up just enough to reach the last stage, then alternate.

    At most ``stages - stage`` microbatches are stashed. A hop between stages stays on the
    critical path of every microbatch; `eager_one_f_one_b` takes it off.

    Source: Narayanan et al., PipeDream-Flush, ICML 2021.
    """
    return _alternate(stage, microbatches, warmup=stages - 1 - stage)


def eager_one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """Yield 1F1B with twice the warm-up, so that a hop has a whole slot to arrive in.

    At most ``2 * (stages - stage) - 1`` microbatches are stashed.
    """
    return _alternate(stage, microbatches, warmup=2 * (stages - 1 - stage))


def _alternate(stage: int, microbatches: int, warmup: int) -> Iterator[Action]:
    warmup = min(microbatches, warmup)
    for m in range(warmup):
        yield Action(stage, Op.FORWARD, m)
    for m in range(microbatches - warmup):
        yield Action(stage, Op.FORWARD, m + warmup)
        yield Action(stage, Op.BACKWARD, m)
    for m in range(microbatches - warmup, microbatches):
        yield Action(stage, Op.BACKWARD, m)
    yield Action(stage, Op.UPDATE)
