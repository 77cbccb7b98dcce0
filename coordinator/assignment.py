"""A plan before it is deployed: who runs what, how, and what it should take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.gradients import Gradients
from edgetrain.codec_spec import CutCodecs
from edgetrain.compiler.cut import Cut
from edgetrain.compiler.stash import Keep


@dataclass(frozen=True, slots=True)
class Assignment:
    """Stages in pipeline order.

    Attributes:
        devices: their names.
        cuts: between them.
        layers: planner's layers in each.
        gradients: how each obtains its gradients.
        keeps: what each stashes.
        blocks: of each device's own layout.
        schedule: its name.
        microbatches: of a step.
        memory_bytes: that each stage needs, as the planner counts.
        step_s: predicted, from one step to the next.
        bound_by: what sets that time, such as ``stage 2 on pi``.
        left_out: devices without a stage, and why.
        gap: by which part of its time another plan might beat it; 0: none does.
        codecs: of each cut; empty: all plain.
    """

    devices: tuple[str, ...]
    cuts: tuple[Cut, ...]
    layers: tuple[range, ...]
    gradients: Gradients
    keeps: tuple[Keep, ...]
    blocks: tuple[int, ...]
    schedule: str
    microbatches: int
    memory_bytes: tuple[float, ...]
    step_s: float
    bound_by: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    gap: float = 0.0
    codecs: tuple[CutCodecs, ...] = ()

    @property
    def placed(self) -> tuple[tuple[str, ...], tuple[range, ...]]:
        """What a device notices of a plan: equal for plans that differ in nothing else."""
        return self.devices, self.layers
