# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads what the jobs of a run wrote, and tells what they learned and their alarms."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_aligner.config.values import is_number
from nemo_aligner.core.errors import UserError

Curve = dict[float, float]
# Phases, and samples of a table between its first and its last step, that are kept: the latest.
LATEST = 2000


@dataclass(frozen=True)
class Phase:
    """What a job did for a time."""

    name: str  # of the phase
    step: float  # of the job
    start: float  # in seconds since the epoch, as `end`
    end: float


@dataclass
class JobRecord:
    """What one job wrote."""

    name: str  # the job's folder, relative to the run
    folder: Path
    series: dict[str, Curve] = field(default_factory=dict)  # by "family/metric"
    # samples with their step, by the key of the table
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)  # in the order in which they ended
    broken_lines: int = 0  # lines that are no JSON objects (the job was killed while writing)
    started: float | None = None  # first and last metric, in seconds since the epoch
    updated: float | None = None

    @property
    def is_policy(self) -> bool:
        """Whether it learns from its own rollouts (PPO, REINFORCE, rejection sampling)."""
        return any(key.startswith(("train_rollouts/", "val_rollouts/")) for key in self.series)

    @property
    def place(self) -> int:
        """Policies, critics, reward models, supervised fine-tuning."""
        if self.is_policy:
            return 0
        if "train/value_clip_fraction" in self.series:
            return 1
        return 2 if "train/rewards_all_mean" in self.series or "train/acc" in self.series else 3


def read_run(run_dir: Path) -> list[JobRecord]:
    """The jobs under `run_dir` that have a metric, by kind, then by their start. `UserError`: no
    such folder.
    """
    if not run_dir.is_dir():
        raise UserError(
            f"{run_dir} is not a folder; give the folder of a run (exp_manager.explicit_log_dir "
            "or one above it)."
        )
    jobs = [_read_job(path, run_dir) for path in sorted(run_dir.rglob("metrics.jsonl"))]
    jobs = [job for job in jobs if job.series]
    return sorted(jobs, key=lambda job: (job.place, job.started or math.inf, job.name))


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
    for record in _read_jsonl(folder / "val_samples.jsonl", job):
        _add(job, "validation samples", [record])
    for record in _read_jsonl(folder / "tables.jsonl", job):
        samples = [sample for sample in record.get("rows") or [] if isinstance(sample, dict)]
        rows = [{"step": record.get("step"), **sample} for sample in samples]
        _add(job, str(record.get("key")), rows)
    if "validation samples" in job.tables:
        job.tables.pop("table/val_rollouts", None)  # the same samples, but fewer of them
    for record in _read_jsonl(folder / "train_samples.jsonl", job):
        _add(job, "samples of self-play", [record])
    for record in _read_jsonl(folder / "timeline.jsonl", job):
        step, start, seconds = (record.get(key) for key in ("step", "start", "seconds"))
        if is_number(step) and is_number(start) and is_number(seconds):
            job.phases.append(Phase(str(record.get("phase")), step, start, start + seconds))
            if len(job.phases) > 2 * LATEST:
                del job.phases[:LATEST]
    return job


def _add(job: JobRecord, key: str, samples: list[dict[str, Any]]) -> None:
    """Of many samples those of the first and of the last step stay, and the latest between."""
    rows = job.tables.setdefault(key, [])
    rows += samples
    if len(rows) > 2 * LATEST:
        ends, first_kept = (rows[0].get("step"), rows[-1].get("step")), len(rows) - LATEST
        rows[:] = [row for n, row in enumerate(rows) if n >= first_kept or row.get("step") in ends]


def _read_jsonl(path: Path, job: JobRecord) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file that may be missing, one after another (all may need too much
    memory). Other lines are counted.
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


def ends_of(curve: Curve) -> Curve:
    """The first and the last value, or the only one, or none."""
    return {end(curve): curve[end(curve)] for end in (min, max) if curve}


# Measures, and metrics that may hold each; the first one that exists counts.
POLICY_MEASURES = """
reward, validation: val_rollouts/rewards val_rollouts/global_rewards
reward, rollouts: train_rollouts/rewards train_rollouts/global_rewards
KL to the reference, per token: train_rollouts/init_policy_kl
response length in tokens, validation: val_rollouts/generation_length \
    val_rollouts/global_response_lengths_mean
response length in tokens, rollouts: train_rollouts/generation_length \
    train_rollouts/global_response_lengths_mean
responses that end by themselves, validation: val_rollouts/fraction_of_samples_properly_ended
responses that end by themselves, rollouts: train_rollouts/fraction_of_samples_properly_ended
turns of a conversation: train_rollouts/turns
number of rewards per response: train_rollouts/rewards_per_response
"""
SUPERVISED_MEASURES = """
loss, validation: validation/loss
loss, training: train/loss
accuracy, validation: validation/acc
accuracy, training: train/acc
margin of rewards, validation: validation/margin validation/rewards_margin
margin of rewards, training: train/margin train/rewards_margin
divergence from the teacher, validation: validation/kd_loss
divergence from the teacher, training: train/kd_loss
divergence from the target, validation: validation/distance
divergence from the target, training: train/distance
response length in tokens, self-play: train/avg_generated_lengths
correlation, validation: validation/correlation
explained variance: train/explained_variance
"""
TRAINED = {
    f"{family}/{name}"
    for family in ("train_optim", "train")
    for name in "lr grad_norm entropy approx_kl ppo_ratio ppo_clip_fraction kl_loss".split()
}


def what_it_learned(job: JobRecord) -> dict[str, str]:
    """Titles of the measures that `job` has, by their keys, in the order of a reader's questions;
    those that are the same up to a comma share a chart.
    """
    titles = {}
    for line in (POLICY_MEASURES if job.is_policy else SUPERVISED_MEASURES).strip().splitlines():
        title, _, keys = line.partition(": ")
        key = next((key for key in keys.split() if key in job.series), None)
        if key is not None:
            titles[key] = title
    return titles


# Quantities that alarms watch: title, metric, and which of its values is the worst.
WATCHED: tuple[tuple[str, str, Any], ...] = (
    ("sampler and trainer disagree", "train_rollouts/sampling_ratio_mean_error", max),
    ("clipped ratios", "train_optim/ppo_clip_fraction", max),
    ("explained variance of the critic", "train_rollouts/explained_variance", min),
    ("responses that end by themselves", "train_rollouts/fraction_of_samples_properly_ended", min),
    ("own responses that end by themselves", "train/fraction_of_samples_properly_ended", min),
    ("own responses that equal the data's", "train/identical_fraction", max),
    ("what chosen and rejected responses have both lost", "train/likelihood_fall", max),
    ("margin of rewards", "train/margin", min),
    ("margin of rewards", "train/rewards_margin", min),
    ("probability of the teacher's top-k tokens", "train/teacher_mass", min),
    ("responses that share the weight of a prompt", "train/effective_responses", min),
)


def alarms(job: JobRecord) -> tuple[list[float], list[float]]:
    """The steps of which `job` has logged its alarms, and those with at least one active."""
    series = job.series
    counts = series.get("train_rollouts/alarms_active", series.get("train/alarms_active", {}))
    steps = sorted(counts)
    return steps, [step for step in steps if counts[step] > 0]
