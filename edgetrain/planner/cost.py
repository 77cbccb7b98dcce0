"""What a stage costs its device in memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Footprint:
    """The sizes that a stage's memory is made of.

    Attributes:
        weight_bytes: all weights, frozen ones too.
        trainable_bytes: the part of them that the optimizer updates.
        stash_bytes: what one microbatch leaves behind between forward and backward.
        activation_bytes: the most that is alive at once while a graph runs, without the
            stash: inputs, outputs and the largest intermediates.
    """

    weight_bytes: int
    trainable_bytes: int
    stash_bytes: int
    activation_bytes: int


def stage_memory_bytes(
    footprint: Footprint,
    *,
    in_flight: int,
    optimizer_copies: int,
    previous_versions: int = 1,
) -> int:
    """Bytes a stage holds while it trains, without the engine and the interpreter.

    Weights, and one more buffer of the trainable ones for the gradient, for each part of
    the optimizer's state, and for each version kept to return to; the stash of every
    microbatch in flight; the activations of the graph that runs.

    Args:
        footprint: the sizes.
        in_flight: microbatches stashed at once; the schedule's `stash_peak`.
        optimizer_copies: buffers of state: 0 for plain SGD, 1 with momentum, 2 for Adam.
        previous_versions: versions kept until the next commit.
    """
    buffers = 1 + optimizer_copies + previous_versions
    return (
        footprint.weight_bytes
        + buffers * footprint.trainable_bytes
        + in_flight * footprint.stash_bytes
        + footprint.activation_bytes
    )
