"""A plan on its way to the devices: compiled, then in force; and the samples it runs on."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.assignment import Assignment
from edgetrain.bundle import Bundle
from edgetrain.samples import BatchOrder
from edgetrain.wire.messages import LocalData, Ready


@dataclass(frozen=True, slots=True)
class Supply:
    """The samples of a run.

    Attributes:
        order: which of them each step takes.
        local: where they are, if not at the coordinator.
        eval_samples: how many there are to evaluate on.
    """

    order: BatchOrder
    local: LocalData | None
    eval_samples: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan compiled, and not yet deployed.

    Attributes:
        bundles: of the stages in order, with the weights that the model came with.
        remarks: what compiling it came upon.
    """

    assignment: Assignment
    bundles: list[Bundle]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deployed:
    """A plan in force.

    Attributes:
        ready: what each device reported.
        seconds: that it took to send the stages and to load them.
    """

    epoch: int
    draft: Draft
    ready: list[Ready]
    seconds: float

    @property
    def assignment(self) -> Assignment:
        return self.draft.assignment
