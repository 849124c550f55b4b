# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTActorModel`: the policy of PPO. Log-probs: fp32, at the sampling temperature."""

from collections.abc import Callable
from functools import partial

from lightning.pytorch import Trainer
from nemo.utils import logging
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.core.losses import loss_weights, ppo_actor_loss
from nemo_aligner.core.types import PPOTrainBatch
from nemo_aligner.models.alignable_interface import PolicyWithReference
from nemo_aligner.models.nlp.gpt.log_probs import ReferencePolicyMixin
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTPolicyModel
from nemo_aligner.parallel.collectives import sum_over_dp


class MegatronGPTActorModel(ReferencePolicyMixin, MegatronGPTPolicyModel, PolicyWithReference):
    """Policy of PPO on Megatron Core; its attributes are arguments of `ppo_actor_loss`, and
    `train_on_truncated`: responses that did not end count in the loss too.
    """

    CONFIG_NAME = "gpt_ppo_actor"
    SECTION = "ppo"
    without_reference = (
        ", or set trainer.ppo.initial_policy_kl_penalty=0 (and model.ppo.kl_loss_coef=0)"
    )

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        self.entropy_bonus: float = self.settings.entropy_bonus
        self.ratio_eps: float = self.settings.ratio_eps
        self.ratio_eps_high: float | None = self.settings.ratio_eps_high
        self.policy_loss: str = self.settings.policy_loss
        self.dual_clip: float | None = self.settings.dual_clip
        self.kl_loss_coef: float = self.settings.kl_loss_coef
        self.kl_loss_estimator: str = self.settings.kl_loss_estimator
        self.train_on_truncated: bool = self.settings.train_on_truncated
        self.surrogate_of: Callable[..., Tensor] | None = None
        if self.kl_loss_coef and self.kl_loss_estimator == "k1":
            logging.warning(
                "model.ppo.kl_loss_estimator=k1 has a gradient of 0 on average: it does not hold "
                "the policy to the reference; k2 and k3 do."
            )
        self.take_logprobs_as_sampled()

    def get_loss_and_metrics(
        self, batch: PPOTrainBatch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """PPO loss (`core.losses.ppo_actor_loss`) of a global batch, and its gradient unless
        `forward_only`, over the samples whose response ended (`is_end`) unless
        `train_on_truncated`; all ranks call it with their share.
        """
        mask = batch["mask"]
        if not self.train_on_truncated:
            mask = mask * batch["is_end"].unsqueeze(-1)
        columns = {
            "tokens": batch["response_tokens"],
            "advantages": batch["advantages"],
            "prev_logprobs": batch["prev_logprobs"],
        }
        if self.kl_loss_coef:
            columns["ref_logprobs"] = batch["init_logprobs"]
        if "old_kl_coefs" in batch:
            columns["old_kl_coefs"] = batch["old_kl_coefs"]
        if self.loss_reduction == "constant":  # its weights do not add up to 1
            columns["metric_weights"] = loss_weights(mask, sum_over_dp=sum_over_dp)
        loss = partial(
            ppo_actor_loss,
            ratio_eps=self.ratio_eps,
            ratio_eps_high=self.ratio_eps_high,
            policy_loss=self.policy_loss,
            dual_clip=self.dual_clip,
            kl_loss_coef=self.kl_loss_coef,
            kl_loss_estimator=self.kl_loss_estimator,
            entropy_bonus=self.entropy_bonus,
            surrogate_of=self.surrogate_of,
        )
        return self.compute_loss(loss, columns, forward_only, mask=mask)
