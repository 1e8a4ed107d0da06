"""Line charts as SVG, for pages without scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, BOTTOM = 960, 240, 70, 24
"""Pixels of a chart, and of the margins for its axes."""
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
MAX_POINTS = 1000
"""Points of a curve; of a longer one each interval shows its smallest and its largest value."""


class Mark(NamedTuple):
    """An interval of the time axis that a chart emphasises, or a moment if both ends are the same."""

    begin: float
    end: float
    color: str
    text: str


def chart(title: str, curves: dict[str, list[tuple[float, float]]], marks: Sequence[Mark], end: float) -> str:
    """Return an SVG element of curves over `0 … end` seconds; values that are not finite are left out."""
    shown = {name: _thinned([p for p in points if math.isfinite(p[1])]) for name, points in curves.items()}
    values = [value for points in shown.values() for _, value in points]
    if not values:
        return f"<p>{escape(title)}: no values.</p>"
    low, high = min(values), max(values)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    end = end or 1.0

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT) * min(max(at / end, 0.0), 1.0)

    def y(value: float) -> float:
        return 4 + (HEIGHT - BOTTOM - 8) * (high - value) / (high - low)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for mark in marks:
        width = max(x(mark.end) - x(mark.begin), 1.5)
        parts.append(
            f'<rect x="{x(mark.begin):.1f}" y="0" width="{width:.1f}" height="{HEIGHT - BOTTOM}" fill="{mark.color}" '
            f'fill-opacity="0.45"><title>{escape(mark.text)}</title></rect>'
        )
    for i in range(5):
        value, at = low + (high - low) * i / 4, end * i / 4
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        anchor = "start" if i == 0 else "end" if i == 4 else "middle"
        parts.append(f'<text x="{x(at):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{at:.4g} s</text>')
    for i, (name, points) in enumerate(shown.items()):
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{COLORS[i % len(COLORS)]}" stroke-width="1.5">'
            f"<title>{escape(name)}</title></polyline>"
        )
    legend = "".join(
        f'<span><b style="color:{COLORS[i % len(COLORS)]}">—</b> {escape(name)}</span> ' for i, name in enumerate(shown)
    )
    return "".join([*parts, "</svg>", f"<p>{legend}</p>"])


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(2 * len(points) / MAX_POINTS)
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [point for part in parts for point in sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})]
