# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of a page that the training report and the page of an evaluation share."""

import time
from html import escape

from nemo_aligner.report.style import STYLE


def document(title: str, body: str) -> str:
    """A whole HTML page, with the time at which it was written.

    Args:
        title: plain text.
        body: HTML.
    """
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


def sample_table(names: tuple[str, ...], cells: list[tuple[str, ...]]) -> str:
    """A table of texts: `names` of the columns, and the rows."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells
    )
    return f'<table class="samples"><tr>{head}</tr>{body}</table>'


def when(seconds: float) -> str:
    """A time, in seconds since the epoch, as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
