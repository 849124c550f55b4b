# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How a job was started: command, versions, git, and what its configuration sets. The job has
written all of it without secrets (`launch/experiment.py`).
"""

import json
import re
import shlex
from html import escape
from pathlib import Path
from typing import Any

from nemo_aligner.report.elements import folded

ABOUT_FILE = "run.json"
TEMPORARY = re.compile(r"/nemo_[0-9a-f]{16}\b")  # where the files of a `.nemo` were unpacked
Row = tuple[str, Any, Any]  # key, value, default


def about(folder: Path) -> str:
    """The section about the job of `folder`, as HTML; empty if it has left nothing about it."""
    if not (folder / ABOUT_FILE).exists():
        return ""
    from omegaconf import OmegaConf  # here: curves do not need it

    from nemo_aligner.config.defaults import differences
    from nemo_aligner.config.rules import restore_key

    record = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
    lines = [", ".join(map(" ".join, record["versions"].items())), _git(folder / "git-info.log")]
    chosen: list[Row] = []
    of_base: list[Row] = []
    if record["job"] is not None:
        cfg = OmegaConf.load(folder / "config.yaml")
        has_base = OmegaConf.select(cfg, restore_key(record["job"])) is not None
        words = shlex.split(record["command"])
        given = tuple(f"{word.partition('=')[0].lstrip('+')}." for word in words if "=" in word)
        for key, value, default, is_left in differences(cfg, record["job"]):
            came_along = has_base and is_left and not f"{key}.".startswith(given)
            if not (came_along and TEMPORARY.search(str(value))):
                (of_base if came_along else chosen).append((key, value, default))
    summary = f"{len(of_base)} of the checkpoint, or that the defaults leave to it"
    return folded(
        f"How it was started, and {len(chosen)} settings that are not the defaults",
        f'<pre class="tokens">{escape(record["command"])}</pre>'
        + "".join(f"<p>{escape(line)}</p>" for line in lines)
        + _table(chosen)
        + folded(summary, _table(of_base) if of_base else ""),
    )


def _table(rows: list[Row]) -> str:
    cells = (
        "".join(f"<td>{escape(str(cell))}</td>" for cell in row)
        for row in [("key", "value", "default"), *rows]
    )
    return f"<table><tr>{'</tr><tr>'.join(cells)}</tr></table>"


def _git(file: Path) -> str:
    """The checkout that the job was started in, of the file that NeMo writes."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    *_, last = re.split(r"^commit hash: ", text, flags=re.MULTILINE)  # one for each start
    if not last:
        return "It was not started in a git checkout."
    changed = re.findall(r"^diff --git a/(.*) b/", last, re.MULTILINE)
    return f"git commit {last.split()[0]}, changed files: {', '.join(changed) or 'none'}"
