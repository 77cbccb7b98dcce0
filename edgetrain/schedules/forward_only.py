"""Evaluation: every microbatch passes through once, and nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator

from edgetrain.schedules.actions import Action, Op


def forward_only(stage: int, stages: int, microbatches: int) -> Iterator[Action]:  # noqa: ARG001 - the signature all schedules share
    """Yield one forward a microbatch; no stash, no update."""
    for m in range(microbatches):
        yield Action(stage, Op.FORWARD, m)
