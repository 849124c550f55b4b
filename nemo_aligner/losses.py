# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""All losses, as functions of plain tensors, and their weights; each statement names where they
stand.
"""

from nemo_aligner.core.distillation import distillation_loss
from nemo_aligner.core.estimators import LOSS_REDUCTIONS
from nemo_aligner.core.losses import (
    loss_count,
    loss_weights,
    ppo_actor_loss,
    ppo_critic_loss,
    preference_loss,
    regression_loss,
    reinforce_loss,
    sft_loss,
)
from nemo_aligner.core.preference import dpo_loss, kto_loss
