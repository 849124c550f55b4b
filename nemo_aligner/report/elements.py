# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of pages: frame, tables, line charts and a timeline as SVG, in the reader's light or dark
theme; and tables for a terminal.
"""

import math
import time
from collections.abc import Collection, Sequence
from html import escape
from itertools import zip_longest
from typing import Any

from nemo_aligner.report.reading import Curve, JobRecord, Phase

STYLE = """
:root { color-scheme: light dark;
  --back: #ffffff; --text: #1c2330; --soft: #667085; --line: #e3e7ee;
  --c1: #2563c9; --c2: #c2410c; --c3: #15803d; --c4: #7c3aed; --c5: #be185d; --c6: #0e7490; }
@media (prefers-color-scheme: dark) { :root {
  --back: #14181f; --text: #e6eaf1; --soft: #97a1b3; --line: #2a313d;
  --c1: #6ea8fe; --c2: #fb923c; --c3: #4ade80; --c4: #c4b5fd; --c5: #f472b6; --c6: #22d3ee; } }
body { margin: 2rem auto; max-width: 1240px; padding: 0 1rem;
  background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
p { color: var(--soft); }
p.good { color: var(--c3); } p.bad { color: var(--c2); font-weight: 600; }
nav a { margin-right: 1rem; } a { color: var(--c1); }
.charts { display: grid; gap: 1rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); }
svg { width: 100%; height: auto; }
svg text { fill: var(--text); font: 11px system-ui, sans-serif; }
svg text.title { font-size: 13px; font-weight: 600; } svg text.tick { fill: var(--soft); }
.grid { stroke: var(--line); }
.c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); }
.curve { fill: none; stroke: currentColor; stroke-width: 1.6; stroke-linejoin: round; }
.dashed { stroke-dasharray: 6 4; } .dotted { stroke-dasharray: 1.5 3; }
.legend { position: sticky; top: 0; background: var(--back); }
.legend span, th[class] { border-bottom: 2px solid currentColor; margin-right: 1rem; }
.legend .dashed, th.dashed { border-bottom-style: dashed; }
.legend .dotted, th.dotted { border-bottom-style: dotted; }
circle, rect, svg text.label { fill: currentColor; }
circle.thin { fill: transparent; } rect.idle { fill: var(--line); }
svg text.on-bar { fill: var(--back); } rect.idle + text.on-bar { fill: var(--soft); }
table { border-collapse: collapse; }
td, th { border-bottom: 1px solid var(--line); padding: .3rem .8rem; text-align: left;
  vertical-align: top; }
td { white-space: pre-wrap; overflow-wrap: anywhere; }
.numbers td + td, .numbers th + th { text-align: right; font-variant-numeric: tabular-nums; }
.samples { width: 100%; } .samples td, .samples th { width: 38%; }
.samples td:first-child, .samples th:first-child { width: 24%; }
pre.tokens { white-space: pre-wrap; overflow-wrap: anywhere; padding: .8rem;
  border: 1px solid var(--line); }
.marked { color: var(--c3); font-weight: 600; } .special { border: 1px solid var(--soft); }
details { margin: 1rem 0; } summary { cursor: pointer; color: var(--soft); }
"""


def document(title: str, body: str) -> str:
    """A whole HTML page of a plain `title` and an HTML `body`, with the time of writing."""
    title = escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n"
        f"<body><h1>{title}</h1><p>Written {when(time.time())}.</p>{body}</body></html>\n"
    )


def folded(summary: str, body: str) -> str:
    """`body` behind a line that unfolds it; nothing if it is empty."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>" if body else ""


def table(
    rows: Sequence[Sequence[object]], kind: str = "numbers", colors: Sequence[str] = ()
) -> str:
    """A table of texts, the head first; nothing without a row below the head. `kind` is a class of
    the style sheet, `colors` are classes of the head's cells behind the first one.
    """
    if len(rows) < 2:
        return ""
    classes = ["", *(f' class="{color}"' for color in colors)]
    text = "".join(
        f"<th{name}>{escape(str(cell))}</th>"
        for cell, name in zip_longest(rows[0], classes, fillvalue="")
    )
    for row in rows[1:]:
        text += f"</tr><tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}"
    return f'<table class="{kind}"><tr>{text}</tr></table>'


def unfolded(rows: Sequence[Sequence[object]], names: Sequence[object], first: int) -> str:
    """A table of samples, of which all but the `first` unfold."""
    more = rows[first:]
    return table([names, *rows[:first]], "samples") + folded(
        f"{len(more)} more", table([names, *more], "samples")
    )


def columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Rows of texts as columns of equal width; those `left` begin on the left, others end on the
    right.
    """
    aligned = []
    for number, column in enumerate(zip(*rows, strict=True)):
        adjust, width = str.ljust if number in left else str.rjust, max(map(len, column))
        aligned.append([adjust(cell, width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*aligned, strict=True))


def when(seconds: float) -> str:
    """A time, in seconds since the epoch, as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


# --- charts --------------------------------------------------------------------------------------

# Families whose metrics of the same name share a chart, because their steps count the same thing.
PAIRED_FAMILIES = {"val_rollouts": "train_rollouts", "validation": "train", "test": "train"}
TIMES = "timers/"
COLORS, LINES = 6, 3  # in `STYLE`
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
        if not key.startswith(TIMES):
            charts.setdefault((PAIRED_FAMILIES.get(family, family), metric), {})[family] = curve
    moving: list[Chart] = []
    constant: list[Chart] = []
    for (_, metric), curves in charts.items():
        first_family, *others = curves
        title = metric if others or not first_family else f"{first_family}/{metric}"
        is_constant = len({*values_of(curves)}) == 1 and max(map(len, curves.values())) > 1
        (constant if is_constant else moving).append((title, curves))
    return moving, constant


def values_of(curves: dict[str, Curve]) -> list[float]:
    return [value for curve in curves.values() for value in curve.values()]


def chart_grid(charts: Sequence[Chart], **options: Any) -> str:
    """Charts beside each other; `options` as of `chart_svg`."""
    if not charts:
        return ""
    drawn = "".join(chart_svg(*chart, **options) for chart in charts)
    return f'<div class="charts">{drawn}</div>'


def color_of(number: int) -> str:
    """Classes of the curve `number` of a chart: a colour, then the next kind of line."""
    return f"c{number % COLORS + 1}" + ("", " dashed", " dotted")[number // COLORS % LINES]


def chart_svg(
    title: str, curves: dict[str, Curve], axis: str = "step", labels: bool = True
) -> str:
    """A line chart; `labels` are shown for several curves. `axis` names what runs to the right."""
    steps = [step for curve in curves.values() for step in curve]
    values = values_of(curves)
    x_low, x_high = _widen(min(steps), max(steps))
    y_low, y_high = _widen(min(values), max(values))

    def x_of(step: float) -> float:
        return LEFT + (step - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [_text(title, LEFT, 18, "title", "start")]
    for tick in ticks(y_low, y_high):
        y = y_of(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_text(format_number(tick), LEFT - 6, y + 4, "tick"))
    for tick in ticks(x_low, x_high):
        parts.append(_text(format_number(tick), x_of(tick), HEIGHT - 8, "tick", "middle"))
    for number, (label, curve) in enumerate(curves.items()):
        color = color_of(number)
        # Some of many, evenly spread, the last one included.
        stride = max(math.ceil(len(curve) / MAX_POINTS), 1)
        shown = sorted(curve.items())[::-stride][::-1]
        points = [(step, value, x_of(step), y_of(value)) for step, value in shown]
        path = " ".join(f"{x:.1f},{y:.1f}" for _, _, x, y in points)
        parts.append(f'<polyline class="curve {color}" points="{path}"/>')
        radius, thin = (2.5, "") if len(points) <= 25 else (1, " thin")
        for step, value, x, y in points:
            tip = escape(f"{label}, {axis} {format_number(step)}: {format_number(value)}")
            place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}"'
            parts.append(f'<circle class="{color}{thin}" {place}><title>{tip}</title></circle>')
        if labels and len(curves) > 1:
            parts.append(_text(label, WIDTH - RIGHT, 12 + 12 * number, f"label {color}"))
    return _svg(title, WIDTH, HEIGHT, parts)


def _text(text: str, x: float, y: float, kind: str = "", anchor: str = "end") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def _svg(label: str, width: int, height: int, parts: Sequence[str]) -> str:
    frame = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}"'
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


# --- timeline ------------------------------------------------------------------------------------

STEPS = 3  # of the policy, the last ones
LANES_WIDTH, LANE, LANES_LEFT, LANES_TOP, LANES_BOTTOM = 1180, 30, 120, 8, 24
LEAST_LABEL = 7.0  # pixels that a letter of a label takes
# Colours by what the name of a phase contains; the first that fits. Others are grey.
COLOURS = {
    "wait": "idle",
    "generate": "c1",
    "score": "c2",
    "train": "c3",
    "logprobs": "c4",
    "prepare": "idle",
    "finish": "idle",
}


def timeline_svg(jobs: list[JobRecord]) -> str:
    """The last steps of the first policy and what the other jobs did meanwhile; may be empty."""
    policy = next((job for job in jobs if job.is_policy and job.phases), None)
    if policy is None:
        return ""
    steps = sorted({phase.step for phase in policy.phases if phase.name == "generate"})
    shown = [phase for phase in policy.phases if phase.step in steps[-STEPS:]]
    start, end = min(phase.start for phase in shown), max(phase.end for phase in shown)
    seconds = max(end - start, 1e-9)
    scale = (LANES_WIDTH - LANES_LEFT - RIGHT) / seconds
    parts, y = [], LANES_TOP
    for job in jobs:
        phases = [p for p in _innermost(job.phases) if p.end > start and p.start < end]
        if not phases:
            continue
        parts.append(_text(job.name, LANES_LEFT - 8, y + LANE / 2 + 3))
        for phase in phases:
            left = LANES_LEFT + (max(phase.start, start) - start) * scale
            width = (min(phase.end, end) - max(phase.start, start)) * scale
            color = next((value for key, value in COLOURS.items() if key in phase.name), "idle")
            step, seconds_of = format_number(phase.step), phase.end - phase.start
            tip = f"{phase.name}, step {step}: {seconds_of:.3f} s"
            size = f'x="{left:.1f}" y="{y + 3}" width="{max(width, 0.5):.1f}" height="{LANE - 6}"'
            parts.append(f'<rect class="{color}" {size}><title>{escape(tip)}</title></rect>')
            if len(phase.name) * LEAST_LABEL < width:
                parts.append(_text(phase.name, left + 4, y + LANE / 2 + 4, "on-bar", "start"))
        y += LANE
    height = y + LANES_BOTTOM
    for tick in ticks(0, seconds, 10):
        x = LANES_LEFT + tick * scale
        parts.append(_text(f"{format_number(tick)} s", x, height - 8, "tick", "middle"))
    return _svg("timeline", LANES_WIDTH, height, parts)


def _innermost(phases: list[Phase]) -> list[Phase]:
    """The phases that contain no other."""
    ordered = sorted(phases, key=lambda phase: (phase.start, -phase.end))
    return [
        phase
        for phase, following in zip_longest(ordered, ordered[1:])
        if following is None or following.end > phase.end or following.start >= phase.end
    ]
