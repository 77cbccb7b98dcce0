"""What a simulation writes down: what took time, and what each waited for."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from edgetrain.schedules.actions import Action

COORDINATOR: Final = -1  # the stage number of what feeds the pipeline
START: Final = -1  # the cause of what waits for nothing


class Hop(NamedTuple):
    """The stages between which a message goes; the coordinator is `COORDINATOR`."""

    source: int
    to: int

    def __str__(self) -> str:
        source = "coordinator" if self.source == COORDINATOR else str(self.source)
        return f"{source}->{self.to}"


class Node(NamedTuple):
    """Something that took time.

    Attributes:
        kind: "compute", "link", or "commit" for the coordinator's part in a step.
        place: number of the stage, or of the link.
        action: computed; of a message, the receive that it serves.
        hop: of a message.
        cause: number of the node whose progress let this one begin, or `START`.
    """

    kind: Literal["compute", "link", "commit"]
    place: int
    action: Action
    step: int
    hop: Hop | None
    start_s: float
    end_s: float
    cause: int


class Record:
    """Nodes in the order they were found, without those of early steps.

    Args:
        kept_from: the first step that is written down.
    """

    def __init__(self, kept_from: int) -> None:
        self.nodes: list[Node] = []
        self._kept_from = kept_from

    def add(self, node: Node) -> int:
        """The number of the node; `START` if its step is not kept."""
        if node.step < self._kept_from:
            return START
        self.nodes.append(node)
        return len(self.nodes) - 1
