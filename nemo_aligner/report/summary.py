# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a reader asks first: did the job learn, and did an alarm ring?"""

from dataclasses import dataclass

from nemo_aligner.report.reading import Curve, JobRecord

# Measures, and the metrics that may hold each, of one family: jobs are compared by them. The first
# one that exists counts. Those that differ behind a comma share a chart.
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
# What is shown of the updates.
TRAINED = {
    f"{family}/{name}"
    for family in ("train_optim", "train")
    for name in "lr grad_norm entropy approx_kl ppo_ratio ppo_clip_fraction kl_loss".split()
}


@dataclass(frozen=True)
class Found:
    """A measure of a job with its metric."""

    title: str
    chart: str  # title of the chart to which the curve belongs
    key: str
    curve: Curve


def what_it_learned(job: JobRecord) -> list[Found]:
    """The measures that `job` has, in the order in which a reader asks for them."""
    found = []
    for line in (POLICY_MEASURES if job.is_policy else SUPERVISED_MEASURES).strip().splitlines():
        title, _, keys = line.partition(": ")
        key = next((key for key in keys.split() if key in job.series), None)
        if key is not None:
            found.append(Found(title, title.partition(",")[0], key, job.series[key]))
    return found


# Quantities that alarms watch: title, metric, and whether large values are the bad ones.
WATCHED = (
    ("sampler and trainer disagree", "train_rollouts/sampling_ratio_mean_error", True),
    ("clipped ratios", "train_optim/ppo_clip_fraction", True),
    ("explained variance of the critic", "train_rollouts/explained_variance", False),
    (
        "responses that end by themselves",
        "train_rollouts/fraction_of_samples_properly_ended",
        False,
    ),
    ("own responses that end by themselves", "train/fraction_of_samples_properly_ended", False),
    ("own responses that equal the data's", "train/identical_fraction", True),
    ("what chosen and rejected responses have both lost", "train/likelihood_fall", True),
    ("margin of rewards", "train/margin", False),
    ("margin of rewards", "train/rewards_margin", False),
    ("probability of the teacher's top-k tokens", "train/teacher_mass", False),
    ("responses that share the weight of a prompt", "train/effective_responses", False),
)


@dataclass(frozen=True)
class AlarmRecord:
    """What the alarms of a job saw."""

    steps: int  # logged steps
    active: list[float]  # steps with at least one active warning
    # (title, worst value, last value) of each watched quantity
    watched: list[tuple[str, float, float]]


def alarms(job: JobRecord) -> AlarmRecord | None:
    """The alarms of `job`; None if it logs none."""
    counts = next(
        (
            job.series[key]
            for key in ("train_rollouts/alarms_active", "train/alarms_active")
            if key in job.series
        ),
        None,
    )
    if counts is None:
        return None
    watched = []
    for title, key, large_is_bad in WATCHED:
        if key in job.series:
            curve = job.series[key]
            worst = max(curve.values()) if large_is_bad else min(curve.values())
            watched.append((title, worst, curve[max(curve)]))
    return AlarmRecord(len(counts), [s for s in sorted(counts) if counts[s] > 0], watched)
