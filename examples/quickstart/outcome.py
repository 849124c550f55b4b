# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Did the policy learn? Reads what the actor wrote and compares its validation samples before and
after training.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Each score must rise by at least this many standard errors of the difference of the two means (by
# chance alone, one run in thirty thousand does)...
MIN_STANDARD_ERRORS = 4.0
# ...and by at least `Score.min_rise`. The reward has the reward model's own scale, so its least
# rise is in standard deviations before training; 0.5 is called a medium effect in statistics.
MIN_REWARD_RISE_IN_STD = 0.5


class NoOutcome(Exception):
    """The run wrote too little to judge it."""


@dataclass(frozen=True)
class Score:
    """A number of every validation sample, and which rise of its mean is clear.

    Attributes:
        key: in summary.json.
        of: score of a sample (a line of `val_samples.jsonl`).
        in_std: `min_rise` is in standard deviations of the score before training.
        scale: range of the score, for the reader.
        form: number format of a single sample's score.
    """

    key: str
    name: str
    of: Callable[[dict], float]
    min_rise: float
    in_std: bool = False
    scale: str = ""
    form: str = "+.2f"


REWARD = Score(
    "reward",
    "validation reward",
    lambda sample: float(sample["reward"]),
    MIN_REWARD_RISE_IN_STD,
    in_std=True,
)


@dataclass(frozen=True)
class Rise:
    """One score before and after training; `needed` is the smallest rise that counts as clear."""

    before: float
    after: float
    standard_error: float
    needed: float

    @property
    def clear(self) -> bool:
        return self.after - self.before >= self.needed


@dataclass(frozen=True)
class Outcome:
    """What changed in a run.

    Attributes:
        rises: by the keys of the scores.
        ended_before, ended_after: fraction of responses that end by themselves.
        kl_first, kl_last: KL to the reference per token, exactly 0 at the first rollout; None
            without a reference.
        pairs: per prompt, both responses and their scores.
    """

    first_step: int
    last_step: int
    num_samples: int
    rises: dict[str, Rise]
    ended_before: float | None
    ended_after: float | None
    kl_first: float | None
    kl_last: float | None
    pairs: list[dict]

    @property
    def learned(self) -> bool:
        return all(rise.clear for rise in self.rises.values())

    def to_dict(self) -> dict:
        fields = asdict(self)
        return {**fields.pop("rises"), **fields, "learned": self.learned}


def read_outcome(actor_dir: Path, scores: Sequence[Score]) -> Outcome:
    """Compare the first and the last validation of an actor; `val_samples.jsonl` in its folder has
    every sample of both.

    Raises:
        NoOutcome: fewer than two validations, or fewer than two samples in one of them.
    """
    path = actor_dir / "val_samples.jsonl"
    if not path.exists():
        raise NoOutcome(f"{path} is missing: the actor ran no validation")
    samples = read_jsonl(path)
    steps = sorted({sample["step"] for sample in samples})
    if len(steps) < 2:
        raise NoOutcome(
            f"{path} holds validations of steps {steps}; one before and one after training are "
            "needed"
        )
    before = [sample for sample in samples if sample["step"] == steps[0]]
    after = [sample for sample in samples if sample["step"] == steps[-1]]
    if min(len(before), len(after)) < 2:
        raise NoOutcome(
            f"{path} holds {len(before)} and {len(after)} samples; at least 2 per validation are "
            "needed"
        )

    kl_first, kl_last = first_and_last(actor_dir, "train_rollouts/init_policy_kl")
    ended_before, ended_after = first_and_last(
        actor_dir, "val_rollouts/fraction_of_samples_properly_ended"
    )
    return Outcome(
        first_step=steps[0],
        last_step=steps[-1],
        num_samples=len(after),
        rises={score.key: rise(score, before, after) for score in scores},
        ended_before=ended_before,
        ended_after=ended_after,
        kl_first=kl_first,
        kl_last=kl_last,
        pairs=_pairs(before, after, scores),
    )


def rise(score: Score, before: list[dict], after: list[dict]) -> Rise:
    """Change of the mean of `score` between two lists of at least 2 samples."""
    old, new = ([score.of(sample) for sample in part] for part in (before, after))
    error = math.sqrt(statistics.variance(old) / len(old) + statistics.variance(new) / len(new))
    minimum = score.min_rise * (statistics.stdev(old) if score.in_std else 1.0)
    return Rise(
        before=statistics.mean(old),
        after=statistics.mean(new),
        standard_error=error,
        needed=max(minimum, MIN_STANDARD_ERRORS * error),
    )


def _pairs(before: list[dict], after: list[dict], scores: Sequence[Score]) -> list[dict]:
    """The responses to the same prompt side by side, in the order of the first validation; of a
    prompt that comes several times, the first ones, the second ones, and so on.
    """
    after_by_prompt: dict[str, list[dict]] = {}
    for sample in after:
        after_by_prompt.setdefault(sample["prompt"], []).append(sample)
    pairs = []
    for old in before:
        if after_by_prompt.get(old["prompt"]):
            new = after_by_prompt[old["prompt"]].pop(0)
            pair = {"prompt": old["prompt"], "before": old["response"], "after": new["response"]}
            for score in scores:
                pair |= {f"{score.key}_before": score.of(old), f"{score.key}_after": score.of(new)}
            pairs.append(pair)
    return pairs


def first_and_last(job_dir: Path, key: str) -> tuple[float | None, float | None]:
    """The first and the last value of a metric in a job's `metrics.jsonl`; None if it was never
    logged.
    """
    path = job_dir / "metrics.jsonl"
    records = read_jsonl(path) if path.exists() else []
    values = [record[key] for record in records if record.get(key) is not None]
    return (values[0], values[-1]) if values else (None, None)


def read_jsonl(path: Path) -> list[dict]:
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]
