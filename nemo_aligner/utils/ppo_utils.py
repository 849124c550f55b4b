# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.core.advantages import (
    calculate_advantages_and_returns,
    calculate_grpo_advantages,
    calculate_overlong_penalty,
    calculate_ppo_rewards,
    calculate_reinforce_returns,
    calculate_rloo_advantages,
    calculate_rloo_baseline,
    clip_advantages,
    clip_rewards,
    group_rows,
    select_topk,
    spread_over_response,
)
from nemo_aligner.core.kl import AdaptiveKLController, FixedKLController, calculate_kl_penalty
from nemo_aligner.core.losses import calculate_entropy
from nemo_aligner.core.masks import (
    create_mask,
    masked_mean,
    masked_mean_var,
    masked_std,
    masked_sum,
    whiten,
)
from nemo_aligner.core.tensors import sample_seeds
