# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The former place of these names; what each import statement below names is the present one."""

from nemo_aligner.core.estimators import LOSS_REDUCTIONS
from nemo_aligner.core.losses import (
    loss_count,
    loss_weights,
    ppo_actor_loss,
    ppo_critic_loss,
    preference_loss,
    regression_loss,
    sft_loss,
)
