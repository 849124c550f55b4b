# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.core.advantages import (
    calculate_advantages_and_returns,
    calculate_grpo_advantages,
    calculate_reinforce_returns,
    calculate_rloo_advantages,
    calculate_rloo_baseline,
    clip_advantages,
    group_rows,
    spread_over_response,
)
