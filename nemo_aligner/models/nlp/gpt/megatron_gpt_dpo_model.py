# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Policies that learn from pairs of responses, or from labelled ones, without a reward model.

`MegatronGPTDPOModel`: from preference pairs (DPO, IPO, RPO); `MegatronGPTSPINModel`: to tell the
responses of the data from those of its former self (self-play fine-tuning); `MegatronGPTKTOModel`:
from single responses, desirable or not. B pairs, or samples, on this data-parallel rank, S padded
length.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor

from nemo_aligner.core import preference
from nemo_aligner.core.errors import ConfigError
from nemo_aligner.core.types import DirectPairBatch, LabelledResponseBatch, SelfPlayBatch, SFTBatch
from nemo_aligner.models.alignable_interface import SupervisedInterface
from nemo_aligner.models.nlp.gpt.log_probs import (
    REFERENCE_PREFIX,
    MovingReferenceMixin,
    ReferencePolicyMixin,
)
from nemo_aligner.models.nlp.gpt.megatron_gpt_model import weights_of_samples
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTPolicyModel
from nemo_aligner.parallel.collectives import sum_over_dp
from nemo_aligner.parallel.device import get_device
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
        pair: Any = batch  # by keys that are not literals
        both = {
            name: preference.interleave(pair[chosen], pair[rejected])
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
            return preference.dpo_loss(
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
        preference.reward_statistics(metrics)
        chosen, rejected = metrics["rewards_chosen_mean"], metrics["rewards_rejected_mean"]
        metrics["margin"] = chosen - rejected
        metrics["weights"] = count
        return loss, metrics

    def summarize_metrics(self, metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Replace the mean gains by `likelihood_fall` (see `core.preference`)."""
        summary = super().summarize_metrics(metrics)
        if "gain_chosen" in summary:
            gains = summary.pop("gain_chosen"), summary.pop("gain_rejected")
            summary["likelihood_fall"] = preference.likelihood_fall(*gains)
        return summary


def _loss_settings(section: DictConfig, *own: str) -> dict[str, Any]:
    """Arguments of the loss of DPO or KTO: `own`, and those that both have."""
    same = "preference_loss_weight sft_loss_weight sft_average_log_probs".split()
    return {
        "beta": section.ref_policy_kl_penalty,
        "average_log_probs": section.preference_average_log_probs,
        **{name: section[name] for name in (*same, *own)},
    }


class MegatronGPTDPOModel(DirectPreferenceMixin):
    """Policy of DPO on Megatron Core; its reference is in host memory, or its adapters' base."""

    CONFIG_NAME = "gpt_dpo"

    def __init__(self, cfg: DictConfig, trainer: Trainer | None = None):
        super().__init__(cfg, trainer=trainer)
        dpo = self.cfg.dpo
        self.loss_settings = _loss_settings(dpo, "preference_loss", "label_smoothing")
        self.gt_reward_scale = dpo.gt_reward_scale
        self.forward_micro_batch_size = 2 * dpo.log_prob_forward_micro_batch_size


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
        own = "desirable_loss_weight", "undesirable_loss_weight"
        self.loss_settings = _loss_settings(kto, *own)
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
        ratios = preference.log_ratios(
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
            partial(preference.kto_loss, reference_point=reference_point, **self.loss_settings),
            columns,
            forward_only,
            lengths=batch["sample_length"],
        )
        metrics["kl"] = float(reference_point)
        metrics["weights"] = count
        return loss, metrics

    def summarize_metrics(self, metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Replace the sums of both kinds of samples by their means (`kto_statistics`)."""
        return preference.kto_statistics(super().summarize_metrics(metrics))


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
        """Negative log-likelihood per token of responses, none generated; all ranks call it."""
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
