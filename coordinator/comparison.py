"""What a plan predicted beside what its run measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coordinator.figures import bytes_text, seconds_text
from coordinator.tally import Tally
from edgetrain.plan import HopPlan, Plan

SECONDS: Final = "s"
BYTES: Final = "B"
STEP: Final = "step"
REPLAY: Final = "step, by its stages as measured"
COMPARISON_HEADINGS: Final = ("", "predicted", "measured", "error")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, both ways.

    Attributes:
        what: such as ``"step"``, ``"stage 0 on pi: compute"`` or ``"hop 0 to 1"``.
        predicted, measured: in `unit`; of a whole step where it is time.
        unit: `SECONDS` or `BYTES`.
    """

    what: str
    predicted: float
    measured: float
    unit: str = SECONDS

    @property
    def error(self) -> float:
        """How much the prediction was too high, as a share of what was measured."""
        return (self.predicted - self.measured) / self.measured if self.measured else 0.0

    @property
    def cells(self) -> tuple[str, ...]:
        """As text, one cell for each of `COMPARISON_HEADINGS`."""
        text = seconds_text if self.unit == SECONDS else bytes_text
        numbers = (text(self.predicted), text(self.measured))
        return (self.what, *numbers, f"{self.error:+.0%}")


def compare(
    plan: Plan, tally: Tally, replay_s: float | None = None
) -> tuple[Comparison, ...]:
    """Set the plan in force beside its steps: the step, each stage, each hop.

    Args:
        plan: in force at the end.
        tally: of its steps.
        replay_s: of a step on the virtual clock with the stages' measured times.

    What was not measured is left out: hops over which nothing comes back, and everything
    before the first step.
    """
    found: list[Comparison] = []
    step_s = tally.stages[-1].step_s
    if step_s is not None:
        found.append(Comparison(STEP, plan.predicted_step_s, step_s))
    if step_s is not None and replay_s is not None:
        found.append(Comparison(REPLAY, replay_s, step_s))
    for stage, totals in zip(plan.stages, tally.stages, strict=True):
        if not totals.steps:
            continue
        name = f"stage {stage.stage} on {stage.device}"
        compute_s = stage.predicted_forward_s + stage.predicted_backward_s
        compute_s = compute_s * plan.microbatches + stage.predicted_update_s
        measured_s = totals.compute_s / totals.steps
        memory = (stage.predicted_memory_bytes, totals.memory_peak_bytes, BYTES)
        found.append(Comparison(f"{name}: compute", compute_s, measured_s))
        found.append(Comparison(f"{name}: memory", *memory))
    for number, hop in enumerate(plan.hops):
        hop_s = tally.hop_s(number)
        if hop_s is not None:
            predicted_s = hop.predicted_s * plan.microbatches
            name = f"hop {number} to {number + 1}{_encoded(hop)}"
            found.append(Comparison(name, predicted_s, hop_s))
    return tuple(found)


def _encoded(hop: HopPlan) -> str:
    """What crosses it, where that is encoded."""
    if not hop.codecs:
        return ""
    sizes = f"{bytes_text(hop.down_bytes)} down, {bytes_text(hop.up_bytes)} up"
    return f" as {hop.codecs}: {sizes} a microbatch"
