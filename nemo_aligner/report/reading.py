# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads what the jobs of a run wrote, and sorts the jobs: policies first."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from nemo_aligner.core.errors import UserError

# The values of one metric by step.
Curve = dict[float, float]
# Phases, and samples of a table between its first and its last step, that are kept: the latest.
LATEST = 2000


@dataclass(frozen=True)
class Phase:
    """What a job did for a time."""

    name: str  # of the phase
    step: float  # of the job
    # start, end: in seconds since the epoch
    start: float
    end: float


@dataclass
class JobRecord:
    """What one job wrote."""

    name: str  # the job's folder, relative to the run
    folder: Path
    # the curve of each metric, by "family/metric"
    series: dict[str, Curve] = field(default_factory=dict)
    # samples with their step, by the key of the table
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)  # in the order in which they ended
    broken_lines: int = 0  # lines that are no JSON objects (the job was killed while writing)
    # started, updated: time of the first and of the last metric, in seconds since the epoch
    started: float | None = None
    updated: float | None = None

    @property
    def is_policy(self) -> bool:
        """True if the job trains a policy on its own rollouts (PPO, REINFORCE, rejection
        sampling).
        """
        return any(key.startswith(("train_rollouts/", "val_rollouts/")) for key in self.series)

    @property
    def place(self) -> int:
        """Place on the page: policies, critics, reward models, supervised fine-tuning."""
        if self.is_policy:
            return 0
        if "train/value_clip_fraction" in self.series:
            return 1
        return 2 if "train/rewards_all_mean" in self.series or "train/acc" in self.series else 3


def read_run(run_dir: Path) -> list[JobRecord]:
    """The jobs under `run_dir` that have a metric, in the order of the page: by kind, then by
    their start. `UserError`: no such folder.
    """
    if not run_dir.is_dir():
        raise UserError(
            f"{run_dir} is not a folder; give the folder of a run (exp_manager.explicit_log_dir "
            "or one above it)."
        )
    jobs = [_read_job(path, run_dir) for path in sorted(run_dir.rglob("metrics.jsonl"))]
    jobs = [job for job in jobs if job.series]
    return sorted(jobs, key=lambda job: (job.place, job.started or math.inf, job.name))


def is_number(value: object) -> TypeGuard[float]:
    """True for a finite number that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_job(metrics_path: Path, run_dir: Path) -> JobRecord:
    folder = metrics_path.parent
    is_top = folder == run_dir
    name = run_dir.resolve().name if is_top else folder.relative_to(run_dir).as_posix()
    job = JobRecord(name, folder)
    for record in _read_jsonl(metrics_path, job):
        step, when = record.get("step"), record.get("time")
        if is_number(when):
            job.started = when if job.started is None else job.started
            job.updated = when
        for key, value in record.items():
            # A resumed job repeats steps; the later line counts.
            if key not in ("step", "time") and is_number(value) and is_number(step):
                job.series.setdefault(key, {})[step] = value
    for record in _read_jsonl(folder / "tables.jsonl", job):
        samples = [sample for sample in record.get("rows") or [] if isinstance(sample, dict)]
        rows = job.tables.setdefault(str(record.get("key")), [])
        rows += ({"step": record.get("step"), **sample} for sample in samples)
        _forget_between(rows)
    for record in _read_jsonl(folder / "timeline.jsonl", job):
        step, start, seconds = (record.get(key) for key in ("step", "start", "seconds"))
        if is_number(step) and is_number(start) and is_number(seconds):
            job.phases.append(Phase(str(record.get("phase")), step, start, start + seconds))
            if len(job.phases) > 2 * LATEST:
                del job.phases[:LATEST]
    val_samples = _read_rows(folder / "val_samples.jsonl", job)
    if val_samples:
        job.tables.pop("table/val_rollouts", None)  # the same samples, but fewer of them
        job.tables = {"validation samples": val_samples} | job.tables
    train_samples = _read_rows(folder / "train_samples.jsonl", job)
    if train_samples:
        job.tables["samples of self-play"] = train_samples
    return job


def _read_rows(path: Path, job: JobRecord) -> list[dict[str, Any]]:
    """The samples of a file that the page shows."""
    rows: list[dict[str, Any]] = []
    for record in _read_jsonl(path, job):
        rows.append(record)
        if len(rows) > 2 * LATEST:
            _forget_between(rows)
    return rows


def _forget_between(rows: list[dict[str, Any]]) -> None:
    """Keep the samples of the first and of the last step, and the latest of those between."""
    ends = (rows[0].get("step"), rows[-1].get("step")) if rows else ()
    first_kept = len(rows) - LATEST
    rows[:] = [row for n, row in enumerate(rows) if n >= first_kept or row.get("step") in ends]


def _read_jsonl(path: Path, job: JobRecord) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file that may be missing, one after another: a running job, which
    reads its own, has no room for all of them. Other lines are counted.
    """
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in filter(str.strip, file):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                record = None
            if isinstance(record, dict):
                yield record
            else:
                job.broken_lines += 1
