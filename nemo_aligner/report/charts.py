# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Line charts as SVG: small, in the reader's light or dark theme, without a plotting library."""

import math
from html import escape

from nemo_aligner.report.reading import Curve

# Families whose metrics of the same name share a chart, because their steps count the same thing.
PAIRED_FAMILIES = {"val_rollouts": "train_rollouts", "validation": "train", "test": "train"}
COLORS, LINES = 6, 3  # in elements.py
MAX_POINTS = 400  # per curve; more would be invisible and only make the file large

Chart = tuple[str, dict[str, Curve]]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 380, 210, 58, 12, 30, 26


def group_curves(series: dict[str, Curve]) -> tuple[list[Chart], list[Chart]]:
    """(charts of metrics that change, of others), without times; training and validation share a
    chart.
    """
    charts: dict[tuple[str, str], dict[str, Curve]] = {}
    for key, curve in series.items():
        family, _, metric = key.rpartition("/")
        if not is_time(key):
            charts.setdefault((PAIRED_FAMILIES.get(family, family), metric), {})[family] = curve
    moving: list[Chart] = []
    constant: list[Chart] = []
    for (_, metric), curves in charts.items():
        first_family, *others = curves
        title = metric if others or not first_family else f"{first_family}/{metric}"
        values = {value for curve in curves.values() for value in curve.values()}
        points = max(len(curve) for curve in curves.values())
        (constant if len(values) == 1 and points > 1 else moving).append((title, curves))
    return moving, constant


def is_time(key: str) -> bool:
    return key.startswith("timers/")


def chart_grid(charts: list[Chart], labels: bool = True) -> str:
    if not charts:
        return ""
    drawn = "".join(chart_svg(*chart, labels=labels) for chart in charts)
    return f'<div class="charts">{drawn}</div>'


def color_of(number: int) -> str:
    """Classes of the curve `number` of a chart: a colour, then the next kind of line."""
    return f"c{number % COLORS + 1}" + ("", " dashed", " dotted")[number // COLORS % LINES]


def chart_svg(
    title: str, curves: dict[str, Curve], axis: str = "step", labels: bool = True
) -> str:
    """A line chart; `labels` are shown for several curves. `axis` names what runs to the right."""
    steps = [step for curve in curves.values() for step in curve]
    values = [value for curve in curves.values() for value in curve.values()]
    x_low, x_high = _widen(min(steps), max(steps))
    y_low, y_high = _widen(min(values), max(values))

    def x_of(step: float) -> float:
        return LEFT + (step - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>']
    for tick in ticks(y_low, y_high):
        y = y_of(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        place = f'x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end"'
        parts.append(f'<text class="tick" {place}>{format_number(tick)}</text>')
    for tick in ticks(x_low, x_high):
        place = f'x="{x_of(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle"'
        parts.append(f'<text class="tick" {place}>{format_number(tick)}</text>')
    for number, (label, curve) in enumerate(curves.items()):
        color = color_of(number)
        points = [
            (step, value, x_of(step), y_of(value)) for step, value in _thin(sorted(curve.items()))
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for _, _, x, y in points)
        parts.append(f'<polyline class="curve {color}" points="{path}"/>')
        radius, thin = (2.5, "") if len(points) <= 25 else (1, " thin")
        for step, value, x, y in points:
            tip = escape(f"{label}, {axis} {format_number(step)}: {format_number(value)}")
            place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}"'
            parts.append(f'<circle class="{color}{thin}" {place}><title>{tip}</title></circle>')
        if labels and len(curves) > 1:
            place = f'x="{WIDTH - RIGHT}" y="{12 + 12 * number}" text-anchor="end"'
            parts.append(f'<text class="label {color}" {place}>{escape(label)}</text>')
    frame = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"'
    return f"<svg {frame}>{''.join(parts)}</svg>"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of 10."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def format_number(value: float) -> str:
    """Four significant digits, no trailing zeros."""
    return f"{value:.4g}"


def _widen(low: float, high: float) -> tuple[float, float]:
    """Not zero, relative to the size of its ends (else rounding undoes it)."""
    least = max(abs(low), abs(high), 1e-30) * 1e-6
    if high - low > least:
        return low, high
    margin = abs(low) * 0.1 or 0.5
    return low - margin, high + margin


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about MAX_POINTS of them, evenly spread, the last one included."""
    stride = max(math.ceil(len(points) / MAX_POINTS), 1)
    return points[::-stride][::-1]
