# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""`MegatronGPTSPINModel`: a policy that learns to tell the responses of the data from those of its
former self (self-play fine-tuning). B pairs on this data-parallel rank, S padded length.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor

from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.types import DirectPairBatch, SelfPlayBatch, SFTBatch
from nemo_aligner.models.nlp.gpt.log_probs import REFERENCE_PREFIX, MovingReferenceMixin
from nemo_aligner.models.nlp.gpt.megatron_gpt_dpo_model import DirectPreferenceMixin
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTPolicyModel
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device

# Names in a pair of SPIN -> in a preference pair.
_SIDES = {"actual": "chosen", "generated": "rejected"}


class MegatronGPTSPINModel(MovingReferenceMixin, DirectPreferenceMixin, MegatronGPTPolicyModel):
    """Policy of SPIN on Megatron Core. Its reference is the policy at the beginning of the
    iteration, in host memory; with adapters these alone. Its log-probs are at temperature 1.

    Attributes:
        ref_policy_kl_penalty: beta of the loss, in the iteration at hand.
    """

    CONFIG_NAME = "gpt_spin"
    SECTION = "spin"

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        self.validation_micro_batch_size: int = (
            OmegaConf.select(self.cfg, "data.validation_ds.micro_batch_size")
            or self.cfg.micro_batch_size
        )
        self.set_KL_penalty_by_iteration(0)

    def _read_loss_settings(self) -> None:
        self.loss_settings = {"average_log_probs": self.settings.preference_average_log_probs}
        self.forward_micro_batch_size = self.settings.log_prob_forward_micro_batch_size

    @property
    def ref_policy_kl_penalty(self) -> float:
        return self.loss_settings["beta"]

    def set_KL_penalty_by_iteration(self, iteration: int) -> None:
        """Take beta of the loss for an iteration, from 0; `ConfigError`: there is none."""
        penalty = self.settings.ref_policy_kl_penalty
        if isinstance(penalty, ListConfig):
            if iteration >= len(penalty):
                raise ConfigError(
                    f"model.spin.ref_policy_kl_penalty={list(penalty)} has no value for iteration "
                    f"{iteration + 1}; give one number, or one for each iteration."
                )
            penalty = penalty[iteration]
        self.loss_settings["beta"] = float(penalty)

    def get_ref_policy_logprobs(self, batch: Any) -> Tensor:
        """As of preference pairs; those of the data before those generated."""
        return super().get_ref_policy_logprobs(_preference_pairs(batch))

    def get_loss_and_metrics(
        self, batch: Any, forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Loss of a global batch of pairs (`core.preference.dpo_loss`, the response of the data
        being the chosen one), and its gradient unless `forward_only`; all ranks call it with their
        share, a `SelfPlayBatch` with the log-probs of the reference policy.

        Metrics, over the pairs that count: those of `DirectPreferenceMixin`, with `actual` and
        `generated` for `chosen` and `rejected`; `ref_policy_kl_penalty`; of the generated
        responses `avg_generated_lengths` (in tokens), `fraction_of_samples_properly_ended` and
        `identical_fraction`, the share that equals the response of the data.
        """
        loss, metrics = super().get_loss_and_metrics(_preference_pairs(batch), forward_only)
        # The likelihood of the data is not part of this loss, but the mean log-prob shows it.
        del metrics["sft_loss"], metrics["preference_loss"]
        for own, name in _SIDES.items():
            for quantity in ("rewards", "logprobs"):
                metrics[f"{quantity}_{own}_mean"] = metrics.pop(f"{quantity}_{name}_mean")
        metrics["ref_policy_kl_penalty"] = self.ref_policy_kl_penalty
        return loss, metrics | _generation_metrics(batch)

    def get_loss_and_metrics_vanilla_sft(
        self, batch: SFTBatch, forward_only: bool
    ) -> tuple[float, dict[str, float]]:
        """Negative log-likelihood per token of the responses: needs no generation. All ranks call
        it.
        """
        return self.compute_sft_loss(
            batch, forward_only, "token", self.validation_micro_batch_size
        )


def _preference_pairs(batch: Mapping[str, Tensor]) -> DirectPairBatch:
    pairs: Any = {"loss_mask": batch["loss_mask"]}
    for own, name in _SIDES.items():
        pairs[name] = batch[own]
        for suffix in ("length", "mask"):
            pairs[f"{name}_{suffix}"] = batch[f"{own}_{suffix}"]
        if REFERENCE_PREFIX + own in batch:
            pairs[REFERENCE_PREFIX + name] = batch[REFERENCE_PREFIX + own]
    return pairs


def _generation_metrics(batch: SelfPlayBatch) -> dict[str, float]:
    """Means over the generated responses of all ranks' pairs that count; NaN if none does."""
    counts = batch["loss_mask"].ne(0).any(dim=1).double()
    equal = (batch["actual"] == batch["generated"]) | (batch["actual_mask"] == 0)
    identical = equal.all(dim=1) & (batch["actual_length"] == batch["generated_length"])
    quantities = {
        "avg_generated_lengths": batch["generated_mask"].sum(1),
        "fraction_of_samples_properly_ended": batch["is_end"],
        "identical_fraction": identical,
    }
    sums = [(counts * value.double()).sum() for value in quantities.values()]
    total, *sums = sum_over_dp(torch.stack([counts.sum(), *sums]).to(get_device())).tolist()
    return {
        name: value / total if total else float("nan")
        for name, value in zip(quantities, sums, strict=True)
    }
