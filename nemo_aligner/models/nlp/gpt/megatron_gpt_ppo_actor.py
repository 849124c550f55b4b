# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTActorModel`: the policy of PPO, and beside it the weights of the reference policy in
host memory.

Log-probs come from one function for policy, reference and training, in fp32 and at the temperature
that sampled the tokens.
"""

import torch
from nemo.utils import logging
from omegaconf import DictConfig

from nemo_aligner.core.losses import loss_weights, ppo_actor_loss
from nemo_aligner.models.alignable_interface import PolicyWithReference
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTPolicyModel
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.training.megatron_steps import forward_backward


class MegatronGPTActorModel(MegatronGPTPolicyModel, PolicyWithReference):
    """Policy of PPO on Megatron Core.

    Args:
        cfg: model configuration with a section `ppo` (docs/config.md).
        trainer: Lightning trainer.

    Attributes:
        init_policy_state_dict: weights of the reference policy in host memory, from
            `set_reference_policy`, or None.
        entropy_bonus, ratio_eps, dual_clip, kl_loss_coef, kl_loss_estimator: of the loss.
        train_on_truncated: rows that reached no end train the policy too.
    """

    SECTION = "ppo"

    def __init__(self, cfg: DictConfig, trainer=None):
        super().__init__(cfg, trainer=trainer)
        self.entropy_bonus = self.settings.get("entropy_bonus", 0.0)
        self.ratio_eps = self.settings.ratio_eps
        self.dual_clip = self.settings.get("dual_clip", None)
        self.kl_loss_coef = self.settings.get("kl_loss_coef", 0.0)
        self.kl_loss_estimator = self.settings.get("kl_loss_estimator", "k3")
        self.train_on_truncated = self.settings.get("train_on_truncated", False)
        self.init_policy_state_dict = None
        if self.generation_params.changes_distribution:
            logging.warning(
                "top_k, top_p, repetition_penalty and min_length above 1 make the sampler draw "
                "from another "
                "distribution than the one whose log-probs PPO uses (softmax of logits / "
                "temperature): the updates "
                "are off-policy to that extent."
            )
        if self.kl_loss_coef and self.kl_loss_estimator == "k1":
            logging.warning(
                "model.ppo.kl_loss_estimator=k1: its gradient is 0 on average, so the KL in the "
                "loss does not hold "
                "the policy to the reference; k2 and k3 do."
            )
        # Greedy decoding ignores the temperature, so the log-probs do too.
        self.temperature = (
            1.0 if self.generation_params.use_greedy else self.generation_params.temperature
        )

    # --- reference policy -----------------------------------------------------------------------------------------

    def set_reference_policy(self) -> None:
        """Keep a copy of the present weights as the reference policy; call it before a checkpoint
        is resumed.
        """
        self.init_policy_state_dict = self.weights_to_cpu()

    def get_init_policy_logprobs(self, response_tokens) -> torch.Tensor:
        """`get_inference_log_probs` under the reference policy; one swap of the weights there and
        back.

        Raises:
            RuntimeError: `set_reference_policy` was not called.
        """
        if self.init_policy_state_dict is None:
            raise RuntimeError(
                "there is no reference policy; call set_reference_policy() before training."
            )
        with self.swapped_weights(self.init_policy_state_dict):
            return self.get_inference_log_probs(response_tokens)

    # --- training -------------------------------------------------------------------------------------------------

    def get_loss_and_metrics(
        self, batch: dict, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """PPO loss (`nemo_aligner.core.losses.ppo_actor_loss`) of a global batch, with its
        gradient unless `forward_only`.

        Only samples that ended properly (`is_end`) count, unless `train_on_truncated`. All ranks
        call it, each with its share of the rows.

        Args:
            batch: `response_tokens` int64 `[B, S]`, `is_end` bool `[B]`; `mask`, `advantages`,
                `prev_logprobs` and, with `kl_loss_coef`, `init_logprobs` (of the reference policy)
                `[B, S-1]`.

        Returns:
            The loss and its metrics over the global batch, equal on every rank.
        """
        mask = (
            batch["mask"]
            if self.train_on_truncated
            else batch["mask"] * batch["is_end"].unsqueeze(-1)
        )
        micro_batch_size = self.cfg.micro_batch_size
        rows = {
            "tokens": batch["response_tokens"],
            "advantages": batch["advantages"],
            "prev_logprobs": batch["prev_logprobs"],
            "weights": loss_weights(mask, self.loss_reduction, micro_batch_size, sum_over_dp),
        }
        if self.kl_loss_coef:
            rows["ref_logprobs"] = batch["init_logprobs"]

        def loss_fn(logits, rows):
            logprobs, entropy = self.logprobs_and_entropy(
                logits, rows["tokens"], inference_only=forward_only
            )
            return ppo_actor_loss(
                logprobs=logprobs,
                prev_logprobs=rows["prev_logprobs"],
                advantages=rows["advantages"],
                weights=rows["weights"],
                ratio_eps=self.ratio_eps,
                dual_clip=self.dual_clip,
                ref_logprobs=rows.get("ref_logprobs"),
                kl_loss_coef=self.kl_loss_coef,
                kl_loss_estimator=self.kl_loss_estimator,
                entropy=entropy,
                entropy_bonus=self.entropy_bonus,
            )

        metrics = forward_backward(
            self.model,
            rows,
            micro_batch_size=micro_batch_size,
            loss_fn=loss_fn,
            forward_only=forward_only,
        )
        return metrics["loss"], metrics
