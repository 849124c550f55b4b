# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTDPOModel`: a policy that learns from preference pairs without a reward model (DPO,
IPO, RPO).
"""

from lightning.pytorch import Trainer
from omegaconf import DictConfig

from nemo_aligner.models.nlp.gpt.direct_preference import DirectPreferenceMixin


class MegatronGPTDPOModel(DirectPreferenceMixin):
    """Policy of DPO on Megatron Core, with the weights of the reference policy in host memory, or
    with adapters whose base is the reference policy.
    """

    CONFIG_NAME = "gpt_dpo"

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        dpo = self.cfg.dpo
        self.loss_settings = {
            "beta": dpo.ref_policy_kl_penalty,
            "preference_loss": dpo.preference_loss,
            "label_smoothing": dpo.label_smoothing,
            "average_log_probs": dpo.preference_average_log_probs,
            "preference_loss_weight": dpo.preference_loss_weight,
            "sft_loss_weight": dpo.sft_loss_weight,
            "sft_average_log_probs": dpo.sft_average_log_probs,
        }
        self.gt_reward_scale = dpo.gt_reward_scale
        self.forward_micro_batch_size = 2 * dpo.log_prob_forward_micro_batch_size
