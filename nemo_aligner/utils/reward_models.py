# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.config.server_rules import (
    REWARD_MODEL,
    REWARD_MODEL_PORT,
    RewardModelSpec,
    read_reward_models,
)
