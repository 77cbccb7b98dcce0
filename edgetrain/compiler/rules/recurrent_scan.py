"""A step repeated over time, as a Scan node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgetrain.compiler.build import GraphBuilder, Subgraph
from edgetrain.compiler.rules.shaping import reshape

Values = tuple[str, ...]
Stepped = tuple[Values, Values]  # the new states, and what to collect
# Writes one step into the builder it is given, from the states and this step's part of
# each sequence and of the extra one.
Step = Callable[[GraphBuilder, Values, Values, str | None], Stepped]


@dataclass(frozen=True, slots=True)
class Course:
    """What a scan goes along: T steps of N rows each.

    Attributes:
        steps, batch: T and N.
        from_end: begin with the last step.
        sequences: [T*N, ...] each, at least one.
        extra: one more, which is zero if None.
    """

    steps: int
    batch: int
    from_end: bool
    sequences: Values
    extra: str | None


def scan(
    g: GraphBuilder, step: Step, states: Sequence[str], course: Course
) -> tuple[Values, Values]:
    """Emit a node that runs `step` along `course`.

    Args:
        g: where to emit. The step may use any value of it by name.
        step: called once, to write the node's body.
        states: their values before the first step.
        course: what to go along.

    Returns:
        The states after the last step, and what was collected, [T*N, ...] each, in the
        order of the sequences from whichever end it began.
    """
    extra = () if course.extra is None else (course.extra,)
    rows = (*course.sequences, *extra)
    time = (course.steps, course.batch, -1)
    body = g.subgraph()
    before = tuple(body.new_name("state") for _ in states)
    parts = tuple(body.new_name("part") for _ in rows)
    after, collected = step(
        body, before, parts[: len(course.sequences)], parts[-1] if extra else None
    )
    outputs: list[str] = []
    for value in (*after, *collected):
        # A body's outputs are distinct, and made by its own nodes.
        taken = value in outputs or value in (*before, *parts)
        outputs.append(body("Identity", value) if taken else value)
    results = g.multi(
        "Scan",
        *states,
        *(reshape(g, value, time) for value in rows),
        outputs=len(outputs),
        body=Subgraph((*before, *parts), tuple(body.nodes), tuple(outputs)),
        num_scan_inputs=len(rows),
        scan_input_directions=[int(course.from_end)] * len(rows),
        scan_output_directions=[int(course.from_end)] * len(collected),
    )
    flat = (course.steps * course.batch, -1)
    last, sequences = results[: len(states)], results[len(states) :]
    return last, tuple(reshape(g, value, flat) for value in sequences)
