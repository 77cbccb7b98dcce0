"""Scatter plots as SVG text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 170, 34, 44
LINE = 13  # between labels


class Point(NamedTuple):
    label: str
    x: float
    y: float


def page(panels: Sequence[tuple[str, Sequence[Point]]], x_name: str, y_name: str) -> str:
    """Panels below each other, each with a title; x, from 1, on a logarithmic axis."""
    height = HEIGHT * len(panels)
    size = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for number, (title, points) in enumerate(panels):
        parts.append(f'<g transform="translate(0 {number * HEIGHT})">')
        parts += _panel(title, points, x_name, y_name)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, points: Sequence[Point], x_name: str, y_name: str) -> Iterable[str]:
    top = 2.0 ** math.ceil(math.log2(max(p.x for p in points)))
    low = math.floor(min(p.y for p in points) * 10) / 10
    yield _text(LEFT, 18, title, weight="bold")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_name, anchor="middle")
    yield _text(LEFT, TOP - 4, y_name)
    for i in range(6):
        value = low + (1 - low) * i / 5
        y = _height(value, low)
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
        yield _text(LEFT - 6, y + 4, f"{value:.2f}", anchor="end")
    for power in range(int(math.log2(top)) + 1):
        x = _across(2.0**power, top)
        yield _text(x, HEIGHT - BOTTOM + 16, str(2**power), anchor="middle")
    places = [(_across(p.x, top), _height(p.y, low), p.label) for p in points]
    yield from _labelled(places)


def _labelled(places: Sequence[tuple[float, float, str]]) -> Iterable[str]:
    """Dots, and their labels in a column at the right, in order of height."""
    column, previous = WIDTH - RIGHT + 16, TOP - LINE
    ordered = sorted(places, key=lambda place: place[1])
    for left, (x, y, label) in enumerate(ordered):
        room = HEIGHT - BOTTOM - LINE * (len(ordered) - left - 1)
        at = min(max(y, previous + LINE), room)
        previous = at
        yield f'<path d="M{x:.1f} {y:.1f}L{column - 4} {at:.1f}" stroke="#bbb"/>'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#2563a8"/>'
        yield _text(column, at + 4, label)


def _across(value: float, top: float) -> float:
    return LEFT + math.log2(value) / math.log2(top) * (WIDTH - LEFT - RIGHT)


def _height(value: float, low: float) -> float:
    return TOP + (1 - value) / (1 - low) * (HEIGHT - TOP - BOTTOM)


def _text(
    x: float, y: float, text: str, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )
