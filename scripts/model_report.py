"""The document that `try_models.py` writes: what became of each real model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from fetch_models import MODELS
from trial import GRADIENT_TOLERANCE, STEPS, Outcome

_HEAD: Final = """\
# Real models

<!-- Written by scripts/try_models.py. -->

What the compiler makes of ONNX files that other people's tools wrote. Each file is
normalised, differentiated as one stage, its gradient compared with central differences of
the loss, trained for {steps} steps of Adam on one batch of random data, and exported. The
exported file must differ from the original in nothing but the values of weights, and hold
the trained ones.

- **weights**: tensors that train, and their elements.
- **gradient error**: relative difference between the derivative along a random direction
  and the central difference of the loss, the median over directions. Arithmetic is float32
  and Relu and MaxPool have kinks: up to {tolerance:g} is accepted.
- **loss**: squared error against random targets; cross-entropy with random labels where the
  model ends in Softmax or Sigmoid.
- **nodes replaced**: ConstantOfShape nodes, which can hold one value only, and Identity
  nodes, which repeat a tensor that an exporter had merged with an equal one; they become
  Constant nodes on export. The weights of the `light_*` files are such fillings, and are
  drawn anew before training.

To repeat it (PyTorch is needed for the second line only):

    python scripts/fetch_models.py
    python scripts/export_models.py
    python scripts/try_models.py
"""
_COLUMNS: Final = (
    "| file | from | opset | nodes | weights | outcome | gradient error | loss |\n"
    "|---|---|---|---|---|---|---|---|\n"
)
_LOW_PRECISION: Final = (
    "half_",
    "bf16_",
    "qdq_",
    "qoperator_",
    "dynamic_int8_",
    "four_bit_",
)


def write_report(outcomes: Iterable[Outcome], path: Path) -> None:
    """Write the document."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.name)
    low = [outcome for outcome in ordered if outcome.name.startswith(_LOW_PRECISION)]
    whole = [outcome for outcome in ordered if outcome not in low]
    text = _HEAD.format(steps=STEPS, tolerance=GRADIENT_TOLERANCE)
    text += _section("Float files", whole)
    text += _section("Half precision and quantised files", low)
    text += _refusals(ordered)
    path.write_text(text)


def _section(title: str, outcomes: Sequence[Outcome]) -> str:
    trained = sum(outcome.outcome == "trains" for outcome in outcomes)
    head = f"\n## {title}: {trained} of {len(outcomes)} train\n\n"
    return head + _COLUMNS + "".join(map(_row, outcomes))


def _row(outcome: Outcome) -> str:
    weights = f"{outcome.weights}: {outcome.elements:,}" if outcome.elements else ""
    verdict = outcome.outcome
    if outcome.replaced:
        verdict += f", {outcome.replaced} nodes replaced"
    error = loss = ""
    if outcome.gradient_error is not None:
        error = f"{outcome.gradient_error:.0e}"
    if outcome.loss_before is not None and outcome.loss_after is not None:
        loss = f"{outcome.loss_before:.4g} → {outcome.loss_after:.4g}"
    source = MODELS[outcome.name].requirement if outcome.name in MODELS else "export"
    cells = (
        f"`{outcome.name}`",
        source,
        outcome.opset or "",
        outcome.nodes or "",
        weights,
        verdict,
        error,
        loss,
    )
    return "| " + " | ".join(map(str, cells)) + " |\n"


def _refusals(outcomes: Sequence[Outcome]) -> str:
    lines = [
        f"- `{outcome.name}`: {outcome.reason}\n"
        for outcome in outcomes
        if outcome.outcome != "trains"
    ]
    return "\n## Why the others do not\n\n" + "".join(lines) if lines else ""
