# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of a page that the training report and the page of an evaluation share."""

import time
from collections.abc import Sequence
from html import escape
from itertools import zip_longest

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


def when(seconds: float) -> str:
    """A time, in seconds since the epoch, as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
