# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about a run: `python -m nemo_aligner.report RUN_DIR [--out FILE]`.

Every folder below RUN_DIR with a `metrics.jsonl` is a job (see `training/loggers.py` for the
files). Of each, the page shows curves, time per phase, and sampled texts. It works on a job that
is still running, and needs no script, font or picture from elsewhere. The curves are drawn by the
few lines of SVG below rather than by a plotting library: they then follow the reader's light or
dark theme, stay small, and the report starts at once.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from nemo_aligner.core.errors import UserError

# Families whose metrics of the same name belong into one chart, as their steps count the same
# thing.
PAIRED_FAMILIES = {"val_rollouts": "train_rollouts", "validation": "train", "test": "train"}
TIMERS = "timers"
# Title, and step -> value by label.
Chart = tuple[str, dict[str, dict[float, float]]]
MAX_SAMPLES = 20
MAX_POINTS = 400  # per curve; more would be invisible and only make the file large


# ----------------------------------------------------------------------------------------- reading


@dataclass
class JobRecord:
    """What one job wrote."""

    name: str
    series: dict[str, dict[float, float]] = field(
        default_factory=dict
    )  # "family/metric" -> step -> value
    tables: dict[str, list[dict]] = field(default_factory=dict)  # table key -> rows with a step
    broken_lines: int = 0
    started: float | None = None
    updated: float | None = None


def read_run(run_dir: Path) -> list[JobRecord]:
    """The jobs found under `run_dir`, in the order in which they started.

    Raises:
        UserError: no such folder, or nothing in it to report.
    """
    if not run_dir.is_dir():
        raise UserError(
            f"{run_dir} is not a folder; give the folder of a run (exp_manager.explicit_log_dir "
            "or one above it)."
        )
    jobs = [_read_job(path, run_dir) for path in sorted(run_dir.rglob("metrics.jsonl"))]
    jobs = [job for job in jobs if job.series]
    if not jobs:
        raise UserError(
            f"no metrics.jsonl with a metric in it under {run_dir}; give the folder of a run "
            f"(exp_manager.explicit_log_dir or one above it) that has made its first step."
        )
    return sorted(jobs, key=lambda job: (job.started or math.inf, job.name))


def _read_job(metrics_path: Path, run_dir: Path) -> JobRecord:
    folder = metrics_path.parent
    job = JobRecord(
        name=folder.relative_to(run_dir).as_posix()
        if folder != run_dir
        else run_dir.resolve().name
    )
    for record in _read_jsonl(metrics_path, job):
        step, when = record.get("step"), record.get("time")
        if _is_number(when):
            job.started = when if job.started is None else job.started
            job.updated = when
        for key, value in record.items():
            # A resumed job repeats steps; the later line counts.
            if key not in ("step", "time") and _is_number(value) and _is_number(step):
                job.series.setdefault(key, {})[step] = value
    for record in _read_jsonl(folder / "tables.jsonl", job):
        rows = [row for row in record.get("rows") or [] if isinstance(row, dict)]
        job.tables.setdefault(str(record.get("key")), []).extend(
            {"step": record.get("step"), **row} for row in rows
        )
    val_samples = _read_jsonl(folder / "val_samples.jsonl", job)
    if val_samples:
        job.tables.pop("table/val_rollouts", None)  # the same samples, but fewer of them
        job.tables["validation samples"] = val_samples
    return job


def _read_jsonl(path: Path, job: JobRecord) -> list[dict]:
    """The records of a file that may be missing; lines that are not JSON objects (a job was
    killed) are counted.
    """
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            job.broken_lines += 1
    return records


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# ----------------------------------------------------------------------------------------- drawing


def chart_svg(title: str, curves: dict[str, dict[float, float]]) -> str:
    """A line chart; `curves` maps a label to step -> value. Labels are shown when there is more
    than one curve.
    """
    width, height, left, right, top, bottom = 380, 210, 58, 12, 30, 26
    steps = [step for curve in curves.values() for step in curve]
    values = [value for curve in curves.values() for value in curve.values()]
    x_low, x_high = _widen(min(steps), max(steps))
    y_low, y_high = _widen(min(values), max(values))

    def x_of(step: float) -> float:
        return left + (step - x_low) / (x_high - x_low) * (width - left - right)

    def y_of(value: float) -> float:
        return height - bottom - (value - y_low) / (y_high - y_low) * (height - top - bottom)

    parts = [f'<text class="title" x="{left}" y="18">{escape(title)}</text>']
    for tick in ticks(y_low, y_high):
        y = y_of(tick)
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{left - 6}" y="{y + 4:.1f}" '
            f'text-anchor="end">{format_number(tick)}</text>'
        )
    for tick in ticks(x_low, x_high):
        x, y = x_of(tick), height - 8
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{y}" '
            f'text-anchor="middle">{format_number(tick)}</text>'
        )
    for number, (label, curve) in enumerate(curves.items()):
        points = _thin(sorted(curve.items()))
        path = " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in points)
        color = f"c{number % 4 + 1}"
        parts.append(f'<polyline class="curve {color}" points="{path}"/>')
        radius = 2.5 if len(points) <= 25 else 1
        for step, value in points:
            tip = escape(f"{label}, step {format_number(step)}: {format_number(value)}")
            place = f'cx="{x_of(step):.1f}" cy="{y_of(value):.1f}" r="{radius}"'
            parts.append(f'<circle class="{color}" {place}><title>{tip}</title></circle>')
        if len(curves) > 1:
            place = f'x="{width - right}" y="{12 + 12 * number}" text-anchor="end"'
            parts.append(f'<text class="label {color}" {place}>{escape(label)}</text>')
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers from `low` to `high`, in steps of 1, 2 or 5 times a power of
    ten.
    """
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def format_number(value) -> str:
    """Four significant digits, no trailing zeros."""
    return f"{value:.4g}"


def _widen(low: float, high: float) -> tuple[float, float]:
    """A range of more than zero width (relative to the size of its ends, or rounding would undo
    it).
    """
    least = max(abs(low), abs(high), 1e-30) * 1e-6
    if high - low > least:
        return low, high
    margin = abs(low) * 0.1 or 0.5
    return low - margin, high + margin


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about MAX_POINTS of them, evenly spread, the last one included."""
    stride = max(math.ceil(len(points) / MAX_POINTS), 1)
    return points[::-stride][::-1]


# ------------------------------------------------------------------------------------------- pages


def render(run_dir: Path) -> str:
    """The HTML page of a run."""
    jobs = read_run(run_dir)
    title = escape(f"{run_dir.resolve().name}: training report")
    links = " ".join(
        f'<a href="#job{number}">{escape(job.name)}</a>' for number, job in enumerate(jobs)
    )
    sections = "".join(_job_section(job, f"job{number}") for number, job in enumerate(jobs))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, '
        f'initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><h1>{title}</h1><p>Written "
        f"{_when(time.time())}.</p><nav>{links}</nav>\n{sections}</body></html>\n"
    )


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Render `run_dir` into `out` (default `run_dir/report.html`) and return its path."""
    page = render(run_dir)
    out = out or run_dir / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    return out


def _job_section(job: JobRecord, anchor: str) -> str:
    notes = []
    if job.started is not None:
        minutes = (job.updated - job.started) / 60
        notes.append(
            f"First metric {_when(job.started)}, last {_when(job.updated)} ({minutes:.1f} "
            "minutes)."
        )
    if job.broken_lines:
        notes.append(f"{job.broken_lines} unreadable line(s) were left out.")
    charts, rest = group_curves(job.series)
    body = _chart_grid(charts)
    if rest:
        summary = f"<summary>Values that did not change ({len(rest)})</summary>"
        body += f"<details>{summary}{_chart_grid(rest)}</details>"
    body += _timer_table(job.series)
    for key, rows in job.tables.items():
        body += _samples(key, rows)
    return f'<section id="{anchor}"><h2>{escape(job.name)}</h2><p>{escape(" ".join(notes))}</p>{body}</section>\n'


def _chart_grid(charts: list[Chart]) -> str:
    return (
        f'<div class="charts">{"".join(chart_svg(*chart) for chart in charts)}</div>'
        if charts
        else ""
    )


def group_curves(series: dict[str, dict[float, float]]) -> tuple[list[Chart], list[Chart]]:
    """Charts with training and validation of one metric together; second, those whose value never
    changes.
    """
    charts: dict[tuple[str, str], dict[str, dict[float, float]]] = {}
    for key, curve in series.items():
        family, _, metric = key.rpartition("/")
        if family != TIMERS:
            charts.setdefault((PAIRED_FAMILIES.get(family, family), metric), {})[family] = curve
    moving, constant = [], []
    for (_, metric), curves in charts.items():
        (only_family, *others) = curves
        title = metric if others or not only_family else f"{only_family}/{metric}"
        values = {value for curve in curves.values() for value in curve.values()}
        points = max(len(curve) for curve in curves.values())
        (constant if len(values) == 1 and points > 1 else moving).append((title, curves))
    return moving, constant


def _timer_table(series: dict[str, dict[float, float]]) -> str:
    timers = {
        key.partition("/")[2]: list(curve.values())
        for key, curve in series.items()
        if key.startswith(TIMERS + "/")
    }
    if not timers:
        return ""
    rows = sorted(timers.items(), key=lambda item: -sum(item[1]))
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{len(values)}</td><td>{sum(values) / len(values):.3f}</td>"
        f"<td>{max(values):.3f}</td><td>{sum(values):.1f}</td></tr>"
        for name, values in rows
    )
    head = (
        "<tr><th>phase</th><th>times</th><th>mean, s</th><th>longest, s</th><th>total, s</th></tr>"
    )
    return f'<h3>Time per phase</h3><table class="numbers">{head}{body}</table>'


def _samples(key: str, rows: list[dict]) -> str:
    """The first and the last step side by side where they share prompts, else the latest rows."""
    rows = [row for row in rows if isinstance(row.get("prompt"), str) and "response" in row]
    if not rows:
        return ""
    steps = [row.get("step") for row in rows]
    first, last = steps[0], steps[-1]
    old = {row["prompt"]: row for row in rows if row.get("step") == first}
    new = {row["prompt"]: row for row in rows if row.get("step") == last}
    shared = [prompt for prompt in old if prompt in new] if first != last else []
    if shared:
        head = f"<tr><th>prompt</th><th>step {escape(str(first))}</th><th>step {escape(str(last))}</th></tr>"
        cells = [
            (prompt, _answer(old[prompt]), _answer(new[prompt])) for prompt in shared[:MAX_SAMPLES]
        ]
    else:
        head = "<tr><th>step</th><th>prompt</th><th>response</th></tr>"
        cells = [
            (str(row.get("step")), row["prompt"], _answer(row))
            for row in rows[: -MAX_SAMPLES - 1 : -1]
        ]
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells
    )
    name = key.removeprefix("table/")
    return (
        f'<h3>{escape(name)}: {len(cells)} samples</h3><table class="samples">{head}{body}</table>'
    )


def _answer(row: dict) -> str:
    reward = row.get("reward")
    return f"{row['response']}" + (
        f"\n(reward {format_number(reward)})" if _is_number(reward) else ""
    )


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1c2330; --soft: #667085; --line: #e3e7ee;
  --c1: #2563c9; --c2: #c2410c; --c3: #15803d; --c4: #7c3aed; }
@media (prefers-color-scheme: dark) { :root { --back: #14181f; --text: #e6eaf1; --soft: #97a1b3; --line: #2a313d;
  --c1: #6ea8fe; --c2: #fb923c; --c3: #4ade80; --c4: #c4b5fd; } }
body { margin: 2rem auto; max-width: 1240px; padding: 0 1rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); } p { color: var(--soft); }
nav a { margin-right: 1rem; } a { color: var(--c1); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--text); font: 11px system-ui, sans-serif; }
svg text.title { font-size: 13px; font-weight: 600; } svg text.tick { fill: var(--soft); }
.grid { stroke: var(--line); } .curve { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.curve.c1 { stroke: var(--c1); } .curve.c2 { stroke: var(--c2); }
.curve.c3 { stroke: var(--c3); } .curve.c4 { stroke: var(--c4); }
circle.c1, svg text.c1 { fill: var(--c1); } circle.c2, svg text.c2 { fill: var(--c2); }
circle.c3, svg text.c3 { fill: var(--c3); } circle.c4, svg text.c4 { fill: var(--c4); }
table { border-collapse: collapse; }
td, th { border-bottom: 1px solid var(--line); padding: .3rem .8rem; text-align: left; vertical-align: top; }
td { white-space: pre-wrap; overflow-wrap: anywhere; }
.numbers td + td, .numbers th + th { text-align: right; font-variant-numeric: tabular-nums; }
.samples { width: 100%; } details { margin: 1rem 0; } summary { cursor: pointer; color: var(--soft); }
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nemo_aligner.report", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="folder of a run; every metrics.jsonl below it is a job",
    )
    parser.add_argument("--out", type=Path, help="file to write; default RUN_DIR/report.html")
    args = parser.parse_args(argv)
    try:
        print(write_report(args.run_dir, args.out))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
