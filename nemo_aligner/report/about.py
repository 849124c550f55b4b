# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""How a job was started: command, versions, git, and what its configuration sets. The job has
written all of it without secrets (`launch/experiment.py`).
"""

import json
import re
from html import escape
from pathlib import Path

from nemo_aligner.report.elements import folded

ABOUT_FILE = "run.json"


def about(folder: Path) -> str:
    """The section about the job of `folder`, as HTML; empty if it has left nothing about it."""
    if not (folder / ABOUT_FILE).exists():
        return ""
    from omegaconf import OmegaConf  # here: curves do not need it

    from nemo_aligner.config.defaults import differences

    record = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
    lines = [", ".join(map(" ".join, record["versions"].items())), _git(folder / "git-info.log")]
    rows = [("key", "value", "default")]
    if record["job"] is not None:
        rows += differences(OmegaConf.load(folder / "config.yaml"), record["job"])
    cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    return folded(
        f"How it was started, and {len(rows) - 1} settings that are not the defaults",
        f'<pre class="tokens">{escape(record["command"])}</pre>'
        + "".join(f"<p>{escape(line)}</p>" for line in lines)
        + f"<table><tr>{'</tr><tr>'.join(cells)}</tr></table>",
    )


def _git(file: Path) -> str:
    """The checkout that the job was started in, of the file that NeMo writes."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    *_, last = re.split(r"^commit hash: ", text, flags=re.MULTILINE)  # one for each start
    if not last:
        return "It was not started in a git checkout."
    changed = re.findall(r"^diff --git a/(.*) b/", last, re.MULTILINE)
    return f"git commit {last.split()[0]}, changed files: {', '.join(changed) or 'none'}"
