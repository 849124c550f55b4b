# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules for the commands that use a trained policy: generate and evaluate."""

from nemo_aligner.config.rollout_rules import check_generation, check_responses_differ
from nemo_aligner.config.server_rules import check_reward_function_options
from nemo_aligner.config.values import Values


def check_generation_command(v: Values) -> None:
    """Check how a policy generates (`conf/generate.yaml`)."""
    v.whole("micro_batch_size", 1)
    v.whole("responses_per_prompt", 1)
    check_generation(v)
    check_responses_differ(v, "", v.size("responses_per_prompt"), key="responses_per_prompt")


def check_evaluation(v: Values) -> None:
    """Check how rewards are computed and compared (`conf/evaluate.yaml`)."""
    v.whole("bootstrap.resamples", 1)
    v.whole("bootstrap.seed", 0)
    v.number("bootstrap.confidence", 0, 1, above=True)
    check_reward_function_options(
        v.get("inference.reward_fn_workers"),
        v.get("inference.reward_fn_timeout_s"),
        v.get("inference.reward_fn_fallback"),
    )
