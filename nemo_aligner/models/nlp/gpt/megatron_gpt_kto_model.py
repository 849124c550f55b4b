# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTKTOModel`: a policy that learns from single responses, desirable or not (KTO).
Notation: B samples on this data-parallel rank, S padded length.
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from lightning.pytorch import Trainer
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.core.preference import kto_loss, kto_statistics, log_ratios
from nemo_aligner.core.types import LabelledResponseBatch
from nemo_aligner.models.alignable_interface import SupervisedInterface
from nemo_aligner.models.nlp.gpt.log_probs import ReferencePolicyMixin
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import weights_of_samples
from nemo_aligner.parallel.collectives import sum_over_dp


class MegatronGPTKTOModel(ReferencePolicyMixin, SupervisedInterface):
    """Policy of KTO on Megatron Core; its reference is in host memory, or its adapters' base.
    `loss_settings`: arguments of `core.preference.kto_loss`.
    """

    CONFIG_NAME = "gpt_kto"
    REFERENCE_COLUMNS: ClassVar[Mapping[str, str]] = {
        "ref_policy_log_probs_samples": "sample_mask",
        "ref_policy_log_probs_kl_samples": "kl_sample_mask",
    }

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        kto = self.cfg.kto
        self.loss_settings = {
            "beta": kto.ref_policy_kl_penalty,
            "desirable_loss_weight": kto.desirable_loss_weight,
            "undesirable_loss_weight": kto.undesirable_loss_weight,
            "average_log_probs": kto.preference_average_log_probs,
            "preference_loss_weight": kto.preference_loss_weight,
            "sft_loss_weight": kto.sft_loss_weight,
            "sft_average_log_probs": kto.sft_average_log_probs,
        }
        self.forward_micro_batch_size = kto.log_prob_forward_micro_batch_size

    def reference_point(self, batch: LabelledResponseBatch, weights: Tensor) -> Tensor:
        """How far the policy is from its reference: the mean of `log_ratios` over the mismatched
        samples of the global batch, at least 0 (arXiv:2402.01306, section 4.1); float32, a scalar
        without a gradient, equal on every rank and at every split (NeMo-Aligner's is the mean over
        ranks of a micro-batch's, each at least 0). All ranks call it, with the weights float32
        `[B]` of the samples; the policy is in evaluation mode afterwards.
        """
        self.set_eval()
        logprobs = self.get_inference_log_probs(
            batch["kl_samples"], response_lengths=batch["kl_sample_length"]
        )
        ratios = log_ratios(
            logprobs=logprobs,
            ref_logprobs=batch["ref_policy_log_probs_kl_samples"].to(logprobs.device),
            mask=batch["kl_sample_mask"][:, 1:].to(logprobs.device),
            weights=weights,
            average_log_probs=self.loss_settings["average_log_probs"],
        )
        return sum_over_dp((weights * ratios).sum()).clamp(min=0)

    def get_loss_and_metrics(
        self, batch: LabelledResponseBatch, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """KTO loss of a global batch with the log-probs of the reference policy
        (`get_ref_policy_logprobs`), and its gradient unless `forward_only`; all ranks call it with
        their share. The mismatched samples have a forward pass of their own before. Metrics, over
        the samples that count: those of `kto_loss`, `kl` (the reference point) and `weights`.
        """
        self._check_reference_columns(batch)
        weights, count = weights_of_samples(batch["loss_mask"])
        reference_point = self.reference_point(batch, weights)
        if not forward_only:
            self.set_train()
        columns = {
            "tokens": batch["samples"],
            "mask": batch["sample_mask"][:, 1:],  # column t predicts token t+1
            "ref_logprobs": batch["ref_policy_log_probs_samples"],
            "weights": weights,
            "desirable": batch["preference"],
        }
        loss, metrics = self.compute_loss(
            partial(kto_loss, reference_point=reference_point, **self.loss_settings),
            columns,
            forward_only,
            lengths=batch["sample_length"],
        )
        metrics["kl"] = float(reference_point)
        metrics["weights"] = count
        return loss, metrics

    def summarize_metrics(self, metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Replace the sums of both kinds of samples by their means (`kto_statistics`)."""
        return kto_statistics(super().summarize_metrics(metrics))
