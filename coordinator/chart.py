"""Line charts as SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

Point = tuple[float, float]

_WIDTH: Final = 640
_HEIGHT: Final = 240
_LEFT: Final = 64
_RIGHT: Final = 16
_TOP: Final = 16
_BOTTOM: Final = 40
_MOST_POINTS: Final = 800
_TICKS: Final = 5


def line_chart(points: Sequence[Point], *, x_name: str, y_name: str) -> str:
    """An SVG element of one curve; points that are not finite are left out.

    Long series are thinned to the extremes of each stretch, so that peaks stay visible.
    """
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return f"<p>No {escape(y_name)} was recorded.</p>"
    kept = _thin(finite)
    x_low, x_high = _span([x for x, _ in kept])
    y_low, y_high = _span([y for _, y in kept])

    def place(point: Point) -> str:
        x = _LEFT + (point[0] - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (y_high - point[1]) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{x:.1f},{y:.1f}"

    curve = " ".join(place(point) for point in kept)
    dots = "".join(_dot(place(point)) for point in kept) if len(kept) <= 40 else ""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_name)}">'
        f"{_y_axis(y_low, y_high)}{_x_axis(x_low, x_high)}"
        f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 4}" class="m">{escape(x_name)}</text>'
        f'<polyline class="curve" points="{curve}"/>{dots}</svg>'
    )


def _thin(points: Sequence[Point]) -> list[Point]:
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = -(-2 * len(points) // (_MOST_POINTS - 2))
    kept = {0, len(points) - 1}
    for first in range(0, len(points), size):
        stretch = range(first, min(first + size, len(points)))
        kept.add(min(stretch, key=lambda i: points[i][1]))
        kept.add(max(stretch, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low < high:
        return low, high
    margin = abs(low) / 2 or 0.5
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    return [low + (high - low) * i / (_TICKS - 1) for i in range(_TICKS)]


def _y_axis(low: float, high: float) -> str:
    parts = []
    for i, value in enumerate(reversed(_ticks(low, high))):
        y = _TOP + i / (_TICKS - 1) * (_HEIGHT - _TOP - _BOTTOM)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" ')
        parts.append(f'y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="e" x="{_LEFT - 6}" y="{y + 4:.1f}">{value:.3g}</text>')
    return "".join(parts)


def _x_axis(low: float, high: float) -> str:
    parts = []
    for i, value in enumerate(_ticks(low, high)):
        x = _LEFT + i / (_TICKS - 1) * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM + 16
        parts.append(f'<text class="m" x="{x:.1f}" y="{y}">{value:.0f}</text>')
    return "".join(parts)


def _dot(place: str) -> str:
    x, y = place.split(",")
    return f'<circle class="dot" cx="{x}" cy="{y}" r="3"/>'
