# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTDPOModel`: a policy that learns from preference pairs without a reward model (DPO,
IPO, RPO); and what it shares with SPIN. B pairs on this data-parallel rank, S padded length.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch import Trainer
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.core.preference import dpo_loss, interleave, likelihood_fall, reward_statistics
from nemo_aligner.core.types import DirectPairBatch
from nemo_aligner.models.alignable_interface import SupervisedInterface
from nemo_aligner.models.nlp.gpt.log_probs import ReferencePolicyMixin
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import weights_of_samples
from nemo_aligner.training.megatron_steps import Batch


class DirectPreferenceMixin(ReferencePolicyMixin, SupervisedInterface):
    """A policy with a reference policy, and `dpo_loss` of pairs with the arguments
    `loss_settings`; `gt_reward_scale`: factor of the data's rewards; None: there are none.
    """

    REFERENCE_COLUMNS: ClassVar[Mapping[str, str]] = {
        "ref_policy_log_probs_chosen": "chosen_mask",
        "ref_policy_log_probs_rejected": "rejected_mask",
    }
    loss_settings: dict[str, Any]
    gt_reward_scale: float | None = None

    def get_loss_and_metrics(
        self, batch: DirectPairBatch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Preference loss of a global batch of pairs with the log-probs of the reference policy
        (`get_ref_policy_logprobs`), and its gradient unless `forward_only`; all ranks call it with
        their share. Metrics, over the pairs that count: those of `dpo_loss`, the statistics of the
        rewards, `margin` (of the mean rewards) and `weights` (number of pairs).
        """
        self._check_reference_columns(batch)
        both = {
            name: interleave(batch[chosen], batch[rejected])  # type: ignore[literal-required]
            for name, chosen, rejected in (
                ("tokens", "chosen", "rejected"),
                ("lengths", "chosen_length", "rejected_length"),
                ("mask", "chosen_mask", "rejected_mask"),
                ("ref", "ref_policy_log_probs_chosen", "ref_policy_log_probs_rejected"),
            )
        }
        weights, count = weights_of_samples(batch["loss_mask"])
        columns = {
            "tokens": both["tokens"],
            "mask": both["mask"][:, 1:],  # column t predicts token t+1
            "ref_logprobs": both["ref"],
            # The same for both samples of a pair.
            "weights": weights.repeat_interleave(2),
        }
        if self.gt_reward_scale is not None:
            gaps = self.gt_reward_scale * (batch["chosen_reward"] - batch["rejected_reward"])
            columns["reward_gaps"] = gaps.repeat_interleave(2)

        def loss_of_pairs(
            logprobs: Tensor,
            ref_logprobs: Tensor,
            mask: Tensor,
            weights: Tensor,
            reward_gaps: Tensor | None = None,
        ) -> tuple[Tensor, Batch]:
            return dpo_loss(
                logprobs=logprobs,
                ref_logprobs=ref_logprobs,
                mask=mask,
                weights=weights[0::2],
                reward_gaps=None if reward_gaps is None else reward_gaps[0::2],
                **self.loss_settings,
            )

        loss, metrics = self.compute_loss(
            loss_of_pairs,
            columns,
            forward_only,
            micro_batch_size=2 * self.cfg.micro_batch_size,
            lengths=both["lengths"],
            together=2,
        )
        reward_statistics(metrics)
        chosen, rejected = metrics["rewards_chosen_mean"], metrics["rewards_rejected_mean"]
        metrics["margin"] = chosen - rejected
        metrics["weights"] = count
        return loss, metrics

    def summarize_metrics(self, metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Replace the mean gains by `likelihood_fall` (see `core.preference`)."""
        summary = super().summarize_metrics(metrics)
        if "gain_chosen" in summary:
            gains = summary.pop("gain_chosen"), summary.pop("gain_rejected")
            summary["likelihood_fall"] = likelihood_fall(*gains)
        return summary


class MegatronGPTDPOModel(DirectPreferenceMixin):
    """Policy of DPO on Megatron Core; its reference is in host memory, or its adapters' base."""

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
