# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The names that a configuration may use for estimators and reductions, with what follows from
each. Imports nothing heavy: the configuration is checked with it before torch is loaded.

To add an advantage estimator: a line here, its function and a line in `core/advantages.py`
(`TOKEN_ESTIMATORS` or `RESPONSE_ESTIMATORS`). No other code changes.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdvantageEstimator:
    """Properties of an advantage estimator that the rest of a job depends on."""

    needs_critic: bool = False  # it uses values, so the job trains a critic
    # it compares the responses to one prompt with each other, so there must be at least two, and
    # their advantages have a scale of their own (no normalization)
    compares_responses: bool = False
    divides_by_std: bool = False  # that scale is not the rewards'
    compares_parts: bool = False  # it compares the rewards of an ensemble's models one by one
    # there are none but a teacher's term; rewards, if anything gives them, are only measured
    of_teacher: bool = False


ADVANTAGE_ESTIMATORS = {
    "gae": AdvantageEstimator(needs_critic=True),
    "reinforce_plus_plus": AdvantageEstimator(),
    "rloo": AdvantageEstimator(compares_responses=True),
    "grpo": AdvantageEstimator(compares_responses=True, divides_by_std=True),
    "dr_grpo": AdvantageEstimator(compares_responses=True),
    "gdpo": AdvantageEstimator(compares_responses=True, divides_by_std=True, compares_parts=True),
    "teacher": AdvantageEstimator(of_teacher=True),
}

# What GRPO makes of rewards of steps or tokens: their sum, or each compared with the others'.
PROCESS_REWARDS = ("sum", "steps")

# Estimators of the KL divergence (`core/kl.py`), for the reward and for the loss.
ROLLOUT_LOGPROBS = ("recompute", "sampler")
KL_ESTIMATORS = ("k1", "abs", "k2", "k3")

# Losses of preference pairs (`core/losses.py:preference_loss`).
PREFERENCE_LOSSES = ("regular_bt", "margin_bt", "scaled_bt")
# Of direct pairs (`core/preference.py:pair_losses`); the first need rewards that the data give.
REWARD_PREFERENCE_LOSSES = ("rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl")
DIRECT_PREFERENCE_LOSSES = ("dpo", "ipo", *REWARD_PREFERENCE_LOSSES)

# Student and teacher (`core/losses.py:divergence`), and the rest outside its top k.
DISTILLATION_LOSSES = ("fwd_kl", "bwd_kl", "jsd")
OUTSIDE_TOP_K = ("renormalize", "bucket")

# What a policy's tokens lose by their importance ratios (`core/kl.py`), and of these:
POLICY_LOSSES = ("clip", "gspo", "cispo", "sapo", "gmpo")
LOSSES_OF_TOKENS = ("clip", "cispo")  # have a range of single tokens' ratios
LOSSES_OF_RESPONSES = ("gspo", "gmpo")  # are a mean over responses
RANGED = ("clip", "gspo", "cispo", "gmpo")  # have a range at all
DUAL_CLIPPED = ("clip", "gspo")  # a large ratio of a bad token has no bound

# Levels of the ratio between trainer and sampler (`core/kl.py`), and the rules for
# tokens whose log-prob varies with their advantage (`core/kl.py`).
CORRECTION_LEVELS = ("token", "sequence", "geometric")
COVARIANCE_RULES = ("clip", "kl")

# How the loss of a global batch is averaged (`core/losses.py:loss_weights`).
LOSS_REDUCTIONS = ("token", "sequence", "microbatch")
ROLLOUT_REDUCTIONS = (*LOSS_REDUCTIONS, "constant")  # by the most tokens that a response can have
