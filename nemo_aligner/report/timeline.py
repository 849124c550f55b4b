# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the jobs of a run did at the same time, one lane per job, as SVG."""

from html import escape
from itertools import zip_longest

from nemo_aligner.report.charts import format_number, ticks
from nemo_aligner.report.reading import JobRecord, Phase

STEPS = 3  # of the policy, the last ones
WIDTH, LANE, LEFT, RIGHT, TOP, BOTTOM = 1180, 30, 120, 12, 8, 24
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
    start = min(phase.start for phase in shown)
    end = max(phase.end for phase in shown)
    scale = (WIDTH - LEFT - RIGHT) / max(end - start, 1e-9)
    parts, lanes = [], 0
    for job in jobs:
        phases = [p for p in _innermost(job.phases) if p.end > start and p.start < end]
        if not phases:
            continue
        y = TOP + lanes * LANE
        place = f'x="{LEFT - 8}" y="{y + LANE / 2 + 3:.0f}" text-anchor="end"'
        parts.append(f"<text {place}>{escape(job.name)}</text>")
        for phase in phases:
            left = LEFT + (max(phase.start, start) - start) * scale
            width = (min(phase.end, end) - max(phase.start, start)) * scale
            parts.append(_bar(phase, left, y, width))
        lanes += 1
    height = TOP + lanes * LANE + BOTTOM
    for tick in ticks(0, max(end - start, 1e-9), 10):
        place = f'x="{LEFT + tick * scale:.1f}" y="{height - 8}" text-anchor="middle"'
        parts.append(f'<text class="tick" {place}>{format_number(tick)} s</text>')
    frame = f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="timeline"'
    return f"<svg {frame}>{''.join(parts)}</svg>"


def _bar(phase: Phase, left: float, y: float, width: float) -> str:
    colour = next((value for key, value in COLOURS.items() if key in phase.name), "idle")
    tip = escape(
        f"{phase.name}, step {format_number(phase.step)}: {phase.end - phase.start:.3f} s"
    )
    size = f'x="{left:.1f}" y="{y + 3}" width="{max(width, 0.5):.1f}" height="{LANE - 6}"'
    bar = f'<rect class="{colour}" {size}><title>{tip}</title></rect>'
    if len(phase.name) * LEAST_LABEL < width:
        place = f'x="{left + 4:.1f}" y="{y + LANE / 2 + 4:.0f}"'
        bar += f'<text class="on-bar" {place}>{escape(phase.name)}</text>'
    return bar


def _innermost(phases: list[Phase]) -> list[Phase]:
    """The phases that contain no other."""
    ordered = sorted(phases, key=lambda phase: (phase.start, -phase.end))
    return [
        phase
        for phase, following in zip_longest(ordered, ordered[1:])
        if following is None or following.end > phase.end or following.start >= phase.end
    ]
