# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Did the policy learn? Reads what the actor wrote and compares its validation samples before and after training."""

import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from gold import gold_score

# Each of the two scores must rise by at least this many standard errors of the difference of the two means...
MIN_STANDARD_ERRORS = 4.0
# ...and by at least this much. For the reward, whose scale is the reward model's own, in standard deviations of the
# reward before training (0.5 is what statisticians call a medium effect: a reader sees it in the samples). For the
# gold score, in its own unit: +0.3 means that 15 more of every 100 sentiment words are good instead of bad.
MIN_REWARD_RISE_IN_STD = 0.5
MIN_GOLD_RISE = 0.3


class NoOutcome(Exception):
    """The run wrote too little to judge it."""


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
    """What the last lines of a quickstart run tell."""

    first_step: int
    last_step: int
    num_samples: int
    reward: Rise
    gold: Rise
    ended_before: float | None  # fraction of answers that ended by themselves
    ended_after: float | None
    kl_first: float | None  # KL to the reference per token at the first rollout: exactly 0
    kl_last: float | None
    pairs: list[dict]  # prompt, before, after and their scores

    @property
    def learned(self) -> bool:
        return self.reward.clear and self.gold.clear

    def to_dict(self) -> dict:
        return {**asdict(self), "learned": self.learned}


def read_outcome(actor_dir: Path) -> Outcome:
    """Compare the first and the last validation in an actor's folder: `val_samples.jsonl` has every sample of both.

    Raises:
        NoOutcome: fewer than two validations, or fewer than two samples in one of them.
    """
    path = actor_dir / "val_samples.jsonl"
    if not path.exists():
        raise NoOutcome(f"{path} is missing: the actor ran no validation")
    samples = _read_jsonl(path)
    steps = sorted({sample["step"] for sample in samples})
    if len(steps) < 2:
        raise NoOutcome(f"{path} holds validations of steps {steps}; one before and one after training are needed")
    before = [sample for sample in samples if sample["step"] == steps[0]]
    after = [sample for sample in samples if sample["step"] == steps[-1]]
    if min(len(before), len(after)) < 2:
        raise NoOutcome(f"{path} holds {len(before)} and {len(after)} samples; at least 2 per validation are needed")

    rewards = [[float(sample["reward"]) for sample in part] for part in (before, after)]
    golds = [[gold_score(sample["response"]) for sample in part] for part in (before, after)]
    metrics_path = actor_dir / "metrics.jsonl"
    records = _read_jsonl(metrics_path) if metrics_path.exists() else []
    kl_first, kl_last = _first_and_last(records, "train_rollouts/init_policy_kl")
    ended_before, ended_after = _first_and_last(records, "val_rollouts/fraction_of_samples_properly_ended")
    return Outcome(
        first_step=steps[0],
        last_step=steps[-1],
        num_samples=len(after),
        reward=_rise(*rewards, minimum=MIN_REWARD_RISE_IN_STD * statistics.stdev(rewards[0])),
        gold=_rise(*golds, minimum=MIN_GOLD_RISE),
        ended_before=ended_before,
        ended_after=ended_after,
        kl_first=kl_first,
        kl_last=kl_last,
        pairs=_pairs(before, after),
    )


def _rise(before: list[float], after: list[float], minimum: float) -> Rise:
    error = math.sqrt(statistics.variance(before) / len(before) + statistics.variance(after) / len(after))
    return Rise(
        before=statistics.mean(before),
        after=statistics.mean(after),
        standard_error=error,
        needed=max(minimum, MIN_STANDARD_ERRORS * error),
    )


def _pairs(before: list[dict], after: list[dict]) -> list[dict]:
    """The answers to the same prompt side by side, in the order of the first validation."""
    after_by_prompt = {sample["prompt"]: sample for sample in after}
    return [
        {
            "prompt": old["prompt"],
            "before": old["response"],
            "after": after_by_prompt[old["prompt"]]["response"],
            "reward_before": old["reward"],
            "reward_after": after_by_prompt[old["prompt"]]["reward"],
            "gold_before": gold_score(old["response"]),
            "gold_after": gold_score(after_by_prompt[old["prompt"]]["response"]),
        }
        for old in before
        if old["prompt"] in after_by_prompt
    ]


def _first_and_last(records: list[dict], key: str) -> tuple[float | None, float | None]:
    values = [record[key] for record in records if record.get(key) is not None]
    return (values[0], values[-1]) if values else (None, None)


def _read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
