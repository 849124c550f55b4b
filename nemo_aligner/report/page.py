# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts the page together: per job what it learned, its alarms, how it was started, then curves,
times and samples. What a job has written about its start holds no secrets.
"""

import json
import re
import shlex
from html import escape
from pathlib import Path
from typing import Any

from nemo_aligner.config.values import is_number
from nemo_aligner.core.errors import UserError
from nemo_aligner.report.elements import (
    TIMES,
    chart_grid,
    color_of,
    document,
    folded,
    format_number,
    group_curves,
    table,
    timeline_svg,
    unfolded,
    values_of,
    when,
)
from nemo_aligner.report.reading import (
    TRAINED,
    WATCHED,
    Curve,
    JobRecord,
    alarms,
    ends_of,
    read_run,
    what_it_learned,
)

FIRST_SAMPLES = 5  # shown at once; the others unfold
MAX_SAMPLES = 20


def write_report(*run_dirs: Path, out: Path | None = None) -> Path:
    """Render runs into `out` and return its path; default `report.html` in the run's folder, with
    several in the working directory.
    """
    run_dirs = tuple({run_dir.resolve(): run_dir for run_dir in run_dirs}.values())
    page = render(*run_dirs)
    out = out or (run_dirs[0] if len(run_dirs) == 1 else Path()) / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")  # a reader of a running job never sees half a page
    part.write_text(page, encoding="utf-8")
    part.replace(out)
    return out


def render(*run_dirs: Path) -> str:
    """The HTML page of a run, or of several, whose jobs of one kind are laid over each other.
    `UserError`: a folder is missing, or none has a metric.
    """
    found = {run_dir: read_run(run_dir) for run_dir in run_dirs}
    jobs = [*{job.folder.resolve(): job for run in found.values() for job in run}.values()]
    if not jobs:
        raise UserError(
            f"no metrics.jsonl with a metric in it under {', '.join(map(str, run_dirs))}; give "
            "the folder of a run (exp_manager.explicit_log_dir or one above it) that has made its "
            "first step."
        )
    for job in jobs if len(run_dirs) > 1 else ():
        job.name = str(job.folder)
    waiting = "".join(
        f"<p>{escape(str(run_dir))}: no metric yet.</p>" for run_dir in found if not found[run_dir]
    )
    title = f"{', '.join(run_dir.resolve().name for run_dir in run_dirs)}: training report"
    kinds = {job.place: [each for each in jobs if each.place == job.place] for job in jobs}
    several = [kind for kind in kinds.values() if len(kind) > 1 < len(run_dirs)]
    compared = "".join(map(_compared, several))
    links = " ".join(
        f'<a href="#job{number}">{escape(job.name)}</a>' for number, job in enumerate(jobs)
    )
    sections = "".join(_job_section(job, f"job{number}") for number, job in enumerate(jobs))
    if len(run_dirs) == 1:
        sections += folded("What the jobs did at the same time", timeline_svg(jobs))
    return document(title, f"<nav>{links}</nav>\n{waiting}{compared}{sections}")


def _compared(jobs: list[JobRecord]) -> str:
    """The section with the curves of several jobs over each other."""
    shown: dict[str, dict[str, Curve]] = {}
    rest: dict[str, dict[str, Curve]] = {}
    colors = {job.name: color_of(number) for number, job in enumerate(jobs)}
    for job in jobs:
        titles = what_it_learned(job)
        for key in {**titles, **job.series}:
            if not key.startswith(TIMES):
                charts = shown if key in titles or key in TRAINED else rest
                curves = charts.setdefault(titles.get(key, key), {name: {} for name in colors})
                curves[job.name] = job.series[key]
    spans = (f'<span class="{kind}">{escape(name)}</span> ' for name, kind in colors.items())
    rows = [("first, last", *colors)]
    for title, curves in shown.items():
        ends = (", ".join(map(format_number, ends_of(c).values())) for c in curves.values())
        rows.append((title, *ends))
    more = chart_grid([*rest.items()], labels=False)
    return (
        f"<section><h2>Compared</h2>{table(rows, colors=[*colors.values()])}"
        f'<p class="legend">{"".join(spans)}</p>'
        f"{chart_grid([*shown.items()], labels=False)}"
        f"{folded(f'More curves ({len(rest)})', more)}</section>\n"
    )


def _job_section(job: JobRecord, anchor: str) -> str:
    notes = []
    if job.started is not None and job.updated is not None:
        minutes = (job.updated - job.started) / 60
        first, last = when(job.started), when(job.updated)
        notes.append(f"First metric {first}, last {last} ({minutes:.1f} minutes).")
    if job.broken_lines:
        notes.append(f"{job.broken_lines} unreadable line(s) were left out.")
    titles = what_it_learned(job)
    trained = {key: curve for key, curve in job.series.items() if key in TRAINED}
    rest = {key: job.series[key] for key in job.series if key not in titles | trained}
    moving, constant = group_curves(rest)
    tables = [part for key, rows in job.tables.items() if (part := _samples(key, rows))]
    body = f"<p>{escape(' '.join(notes))}</p>{_learned(job, titles)}"
    body += "".join(tables[:1]) + _alarms(job)
    if trained:
        body += f"<h3>How was it trained?</h3>{chart_grid(sum(group_curves(trained), []))}"
    body += about(job.folder)
    body += folded(f"More curves ({len(moving)})", chart_grid(moving))
    body += folded(f"Values that did not change ({len(constant)})", chart_grid(constant))
    body += folded("Time per phase", _timer_table(job.series))
    body += folded("More samples", "".join(tables[1:]))
    return f'<section id="{anchor}"><h2>{escape(job.name)}</h2>{body}</section>\n'


# ------------------------------------------------------------------------------------- what it did


def _learned(job: JobRecord, titles: dict[str, str]) -> str:
    """First and last value of each measure, and the curves."""
    if not titles:
        return ""
    charts: dict[str, dict[str, Curve]] = {}
    rows = [("", "first", "last", "change")]
    for key, title in titles.items():
        ends = ends_of(job.series[key])
        *first, last = (
            f"{format_number(value)} (step {format_number(step)})" for step, value in ends.items()
        )
        values = [*ends.values()]
        change = f"{values[-1] - values[0]:+.4g}" if first else ""
        rows.append((title, "".join(first), last, change))
        charts.setdefault(title.partition(",")[0], {})[key.rpartition("/")[0]] = job.series[key]
    moving = [chart for chart in charts.items() if len({*values_of(chart[1])}) > 1]
    return f"<h3>Did it learn?</h3>{table(rows)}{chart_grid(moving)}"


def _alarms(job: JobRecord) -> str:
    steps, active = alarms(job)
    if not steps:
        return ""
    kind, said = "good", f"No warning in {len(steps)} logged steps."
    if active:
        listed = ", ".join(map(format_number, active[:MAX_SAMPLES]))
        more = ", ..." if len(active) > MAX_SAMPLES else ""
        kind, said = "bad", f"Warnings in {len(active)} of {len(steps)} logged steps "
        said += f"({listed}{more}); the job's log says which."
    rows: list[tuple[str, ...]] = [("watched", "worst", "last")]
    for title, key, worst in WATCHED:
        if curve := job.series.get(key):
            values = worst(curve.values()), curve[max(curve)]
            rows.append((title, *map(format_number, values)))
    return f'<h3>Alarms</h3><p class="{kind}">{escape(said)}</p>{table(rows)}'


def _timer_table(series: dict[str, Curve]) -> str:
    totals = {key: sum(curve.values()) for key, curve in series.items() if key.startswith(TIMES)}
    rows: list[tuple[object, ...]] = [("phase", "times", "mean, s", "longest, s", "total, s")]
    for key, total in sorted(totals.items(), key=lambda item: -item[1]):
        count, longest = len(series[key]), max(series[key].values())
        times = f"{total / count:.3f}", f"{longest:.3f}", f"{total:.1f}"
        rows.append((key.removeprefix(TIMES), count, *times))
    return table(rows)


# ----------------------------------------------------------------------------------------- samples


def _samples(key: str, rows: list[dict[str, Any]]) -> str:
    """The first and the last step side by side where they share prompts, else the latest."""
    rows = [row for row in rows if isinstance(row.get("prompt"), str) and "response" in row]
    if not rows:
        return ""
    first, last = rows[0].get("step"), rows[-1].get("step")
    old, new = (
        {row["prompt"]: row for row in rows if row.get("step") == step} for step in (first, last)
    )
    shared = [prompt for prompt in old if prompt in new and first != last][:MAX_SAMPLES]
    if shared:
        names = ("prompt", f"step {first}", f"step {last}")
        cells = [(prompt, _response(old[prompt]), _response(new[prompt])) for prompt in shared]
    else:
        names = ("step", "prompt", "response")
        latest = rows[: -MAX_SAMPLES - 1 : -1]
        cells = [(str(row.get("step")), row["prompt"], _response(row)) for row in latest]
    title = escape(key.removeprefix("table/"))
    return f"<h3>{title} ({len(cells)})</h3>{unfolded(cells, names, FIRST_SAMPLES)}"


def _response(row: dict[str, Any]) -> str:
    reward = row.get("reward")
    shown = f"\n(reward {format_number(reward)})" if is_number(reward) else ""
    if isinstance(row.get("actual"), str):
        shown += f"\n(data: {row['actual'].strip()})"
    return f"{str(row['response']).strip()}{shown}"


ABOUT_FILE = "run.json"
TEMPORARY = re.compile(r"/nemo_[0-9a-f]{16}\b")  # where the files of a `.nemo` were unpacked
SETTING = ("key", "value", "default")


def about(folder: Path) -> str:
    """The section about the job of `folder`, as HTML; may be empty."""
    if not (folder / ABOUT_FILE).exists():
        return ""
    from omegaconf import OmegaConf  # here: curves do not need it

    from nemo_aligner.config.defaults import differences
    from nemo_aligner.config.rules import restore_key

    record = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
    lines = [", ".join(map(" ".join, record["versions"].items())), _git(folder / "git-info.log")]
    chosen: list[tuple[str, Any, Any]] = []
    of_base: list[tuple[str, Any, Any]] = []
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
        + table([SETTING, *chosen], "settings")
        + folded(summary, table([SETTING, *of_base], "settings")),
    )


def _git(file: Path) -> str:
    """The checkout that the job was started in, of the file that NeMo writes."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    *_, last = re.split(r"^commit hash: ", text, flags=re.MULTILINE)  # one for each start
    if not last:
        return "It was not started in a git checkout."
    changed = re.findall(r"^diff --git a/(.*) b/", last, re.MULTILINE)
    return f"git commit {last.split()[0]}, changed files: {', '.join(changed) or 'none'}"
