"""A run as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from coordinator.chart import Point, line_chart
from coordinator.comparison import COMPARISON_HEADINGS, Comparison
from coordinator.figures import WIDE_HEADINGS, DeviceRow, seconds_text, wide_cells
from coordinator.metrics import EvalMetrics, GateMetrics, MoveMetrics, StepMetrics

_STYLE: Final = """
:root { color-scheme: light dark; --line: #2563eb; --faint: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child { text-align: left; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid var(--faint); }
svg { width: 100%; max-width: 640px; } svg text { font-size: 12px; fill: currentColor; }
.m { text-anchor: middle; } .e { text-anchor: end; } .grid { stroke: var(--faint); }
.curve { fill: none; stroke: var(--line); stroke-width: 2; } .dot { fill: var(--line); }
.wide { overflow-x: auto; }
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What the page says.

    Attributes:
        title: of the page, such as the run folder's name.
        steps, evaluations: as in ``metrics.jsonl``.
        devices: one row a stage, predicted beside measured.
        plan: as text.
        config: the resolved run file.
        gates: comparisons of stages with their deployed weights.
        moves: to other plans.
        comparisons: of the last plan with its steps.
    """

    title: str
    steps: Sequence[StepMetrics]
    evaluations: Sequence[EvalMetrics]
    devices: Sequence[DeviceRow]
    plan: str
    config: str
    gates: Sequence[GateMetrics] = ()
    moves: Sequence[MoveMetrics] = ()
    comparisons: Sequence[Comparison] = ()


def render(report: Report) -> str:
    """The page; every text in it is escaped."""
    title = escape(report.title)
    sections = [
        ("Loss", _curve([(m.step, m.loss) for m in report.steps], "loss")),
        (
            "Loss on held-out data",
            _curve([(m.step, m.eval_loss) for m in report.evaluations], "loss"),
        ),
        (
            "Accuracy on held-out data",
            _curve([(m.step, m.eval_accuracy) for m in report.evaluations], "accuracy"),
        ),
        ("Devices", _device_table(report.devices)),
        ("Predicted and measured", _comparison_table(report.comparisons)),
        ("Gradients", _reasons(report.devices) + _gates(report.gates)),
        ("Plan", f"{_moves(report.moves)}<pre>{escape(report.plan)}</pre>"),
        ("Run file", f"<pre>{escape(report.config)}</pre>"),
    ]
    body = "\n".join(f"<h2>{heading}</h2>\n{content}" for heading, content in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body>\n<h1>{title}</h1>\n{_summary(report)}\n{body}\n</body></html>\n"
    )


def _curve(points: Sequence[tuple[int, float | None]], name: str) -> str:
    known: list[Point] = [(x, y) for x, y in points if y is not None]
    return line_chart(known, x_name="step", y_name=name)


def _summary(report: Report) -> str:
    if not report.steps:
        return "<p>No step was finished.</p>"
    last = report.steps[-1]
    parts = [f"{last.step} steps in {seconds_text(last.seconds)}"]
    if last.loss is not None:
        parts.append(f"last loss {last.loss:.4f}")
    if report.evaluations and report.evaluations[-1].eval_accuracy is not None:
        parts.append(f"held-out accuracy {report.evaluations[-1].eval_accuracy:.4f}")
    return f"<p>{'; '.join(parts)}.</p>"


def _device_table(rows: Sequence[DeviceRow]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in WIDE_HEADINGS)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in wide_cells(row))}</tr>"
        for row in sorted(rows, key=lambda row: row.stage)
    )
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def _comparison_table(comparisons: Sequence[Comparison]) -> str:
    """How far the plan was from what happened."""
    if not comparisons:
        return "<p>No step was finished.</p>"
    head = "".join(f"<th>{escape(heading)}</th>" for heading in COMPARISON_HEADINGS)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in comparison.cells)}</tr>"
        for comparison in comparisons
    )
    return (
        "<p>Times are of a whole step; a hop's are there and back, of all microbatches,"
        f' waiting behind others included.</p><div class="wide"><table>'
        f"<tr>{head}</tr>\n{body}</table></div>"
    )


def _reasons(rows: Sequence[DeviceRow]) -> str:
    """Why each stage obtains its gradients as it does."""
    items = "".join(
        f"<li>Stage {row.stage}, {escape(row.mode)}: {escape(row.reason)}."
        f"{_signal(row)}</li>"
        for row in sorted(rows, key=lambda row: row.stage)
    )
    return f"<ul>{items}</ul>"


def _signal(row: DeviceRow) -> str:
    signal = row.signal_to_noise
    return f" Signal to noise {signal:.2g} at the end." if signal else ""


def _gates(gates: Sequence[GateMetrics]) -> str:
    """What stages without backprop are worth, and which were given up."""
    if not gates:
        return ""
    words = ("step", "stage", "held-out", "trained", "deployed", "")
    head = "".join(f"<th>{word}</th>" for word in words)
    rows = "".join(
        f"<tr><td>{gate.step}</td><td>{gate.gate_stage}</td>"
        f"<td>{escape(gate.gate_measure)}</td><td>{_number(gate.gate_trained)}</td>"
        f"<td>{_number(gate.gate_deployed)}</td>"
        f"<td>{'rolled back' if gate.rolled_back else 'kept'}</td></tr>"
        for gate in gates
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _moves(moves: Sequence[MoveMetrics]) -> str:
    """When stages moved to other devices or took other layers, and why."""
    items = "".join(
        f"<li>After step {move.step} to {escape(', '.join(move.move_devices))}:"
        f" {escape(move.move_reason)}. Predicted {seconds_text(move.moved_s)} a step"
        f" instead of {seconds_text(move.stayed_s)}; training paused for"
        f" {seconds_text(move.pause_s)}.</li>"
        for move in moves
    )
    return f"<p>The plan below is the last one. Moves:</p><ul>{items}</ul>" if items else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
