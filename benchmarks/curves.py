"""Panels of lines as SVG text, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

Curve = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 40
LEGEND: Final = 46
LEGEND_COLUMNS: Final = 3
COLOURS: Final = ("#2563a8", "#7db3e8", "#c2410c", "#e8a37d", "#3f7d3a", "#777777")
DASHES: Final = ("", "6 3", "", "6 3", "", "2 3")


@dataclass(frozen=True)
class Panel:
    """One chart: lines by name; a point left out is where a way is not possible."""

    title: str
    lines: Mapping[str, Curve]
    ticks: Mapping[float, str]


def page(panels: Sequence[Panel], x_name: str, y_name: str, columns: int = 2) -> str:
    """All panels with one legend above them; every panel has the same names of lines."""
    rows = -(-len(panels) // columns)
    width, height = WIDTH * columns, HEIGHT * rows + LEGEND
    size = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_legend(list(panels[0].lines), width),
    ]
    for number, panel in enumerate(panels):
        x, y = number % columns * WIDTH, number // columns * HEIGHT + LEGEND
        parts.append(f'<g transform="translate({x} {y})">')
        parts += _panel(panel, x_name, y_name)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _legend(names: Sequence[str], width: float) -> Iterator[str]:
    room = (width - LEFT) / LEGEND_COLUMNS
    for number, name in enumerate(names):
        row, column = divmod(number, LEGEND_COLUMNS)
        x, y = LEFT + column * room, 16 + 18 * row
        yield f'<path d="M{x:.1f} {y}h18" {_stroke(number)}/>'
        yield _text(x + 24, y + 4, name)


def _panel(panel: Panel, x_name: str, y_name: str) -> Iterator[str]:
    points = [point for curve in panel.lines.values() for point in curve]
    x_low, x_high = min(panel.ticks), max(panel.ticks)
    y_low = min(y for _, y in points) / 1.15
    y_high = max(y for _, y in points) * 1.15

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / x_low) / math.log(x_high / x_low)
        up = math.log(y / y_low) / math.log(y_high / y_low)
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
        )

    yield _text(LEFT, 14, panel.title, weight="bold")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_name, anchor="middle")
    yield _text(LEFT, TOP - 3, y_name)
    for value in _ticks(y_low, y_high):
        _, y = place(x_low, value)
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
        yield _text(LEFT - 5, y + 4, f"{value:g}", anchor="end")
    for value, name in panel.ticks.items():
        x, _ = place(value, y_low)
        yield f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>'
        yield _text(x, HEIGHT - BOTTOM + 15, name, anchor="middle")
    for number, curve in enumerate(panel.lines.values()):
        places = [place(*point) for point in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{line}" {_stroke(number)}/>'
        for x, y in places:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{COLOURS[number]}"/>'


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten, and twice and five times them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    return [value for value in values if low <= value <= high]


def _stroke(number: int) -> str:
    dash = f' stroke-dasharray="{DASHES[number]}"' if DASHES[number] else ""
    return f'fill="none" stroke="{COLOURS[number]}" stroke-width="2"{dash}'


def _text(
    x: float, y: float, text: str, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )
