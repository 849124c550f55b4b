# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""REINFORCE (RLOO, Ahmadian et al. 2024, arXiv:2402.14740) against reward models in other
processes.

`PolicyGradientTrainer.generate_rollouts` with `make_data`, and `learn`, are the algorithm: score
several responses to each prompt, subtract the KL to the reference and the mean of the prompt's
other responses, and raise the likelihood of each response by what is left.

Shapes: B samples of a rollout on this rank, N over all data-parallel (DP) ranks, S padded length;
per transition `[B, S-1]`, aligned as in `nemo_aligner.core.types`.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, cast

import torch
from nemo.utils import logging
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.algorithms import ppo_data
from nemo_aligner.algorithms.policy_gradient import PolicyGradientTrainer
from nemo_aligner.algorithms.rollouts import PPORolloutBatch as ReinforceRolloutBatch
from nemo_aligner.algorithms.rollouts import (
    compute_num_rollout_microbatches,
    own_samples,
    response_mask,
)
from nemo_aligner.algorithms.training_loop import Parts
from nemo_aligner.checkpoint.checkpointing import CheckpointCallback
from nemo_aligner.config.defaults import complete
from nemo_aligner.config.values import Values
from nemo_aligner.core import types
from nemo_aligner.core.advantages import calculate_rloo_baseline
from nemo_aligner.core.kl import calculate_kl_penalty
from nemo_aligner.core.tensors import masked_sum
from nemo_aligner.models.alignable_interface import PolicyWithReference
from nemo_aligner.servers.scoring_clients import RemoteGPTRMClient
from nemo_aligner.training.loggers import CustomLoggerWrapper
from nemo_aligner.training.schedule import Timer

# Two of them are here in NeMo-Aligner.
__all__ = ["ReinforceRolloutBatch", "ReinforceTrainer", "compute_num_rollout_microbatches"]

RESPONSES_KEY = "trainer.reinforce.num_rollouts_per_prompt"


class ReinforceTrainer(PolicyGradientTrainer):
    """Trains a policy with REINFORCE; `reinforce_optimization_step` counts the updates."""

    SECTION, NAME = "reinforce", "REINFORCE"
    WAIT_TIMER = "rm_wait"

    def __init__(
        self,
        cfg: DictConfig,
        model: PolicyWithReference,
        optimizer: types.Optimizer,
        scheduler: types.Scheduler,
        train_dataloader_builder: types.PromptLoaderBuilder,
        val_dataloader_builder: types.PromptLoaderBuilder | None,
        collate_fn: Any,
        rm: RemoteGPTRMClient,
        batch_iterator_cls: types.PromptIterator,
        logger: CustomLoggerWrapper,
        ckpt_callback: CheckpointCallback,
        run_timer: Timer,
    ):
        """As `PPOTrainer`; the number of responses to a prompt stands in `cfg`. `ConfigError`:
        values of `trainer.reinforce` and `model.reinforce` that cannot work together.
        """
        cfg = complete(cfg, "gpt_reinforce_actor", "trainer.reinforce")
        Values({"trainer": {"reinforce": cfg}}).size(RESPONSES_KEY, 2)
        parts = Parts(cfg, model, optimizer, scheduler, logger, ckpt_callback, run_timer)
        prompts = train_dataloader_builder, val_dataloader_builder, collate_fn, batch_iterator_cls
        super().__init__(parts, *prompts, cfg.num_rollouts_per_prompt, rm.infer_rm)
        self.rm = rm
        if cfg.use_absolute_kl and self.compute_init_policy_kl:
            setting = "trainer.reinforce.use_absolute_kl"
            logging.warning(ppo_data.harm_of_kl(f"{setting}=True", f"{setting}=False"))
        self.check_rollout(RESPONSES_KEY)

    reinforce_optimization_step = property(attrgetter("optimization_step"))

    def learn(
        self, data: types.ReinforceTrainBatch, rollout_metrics: dict[str, Any]
    ) -> dict[str, Any]:
        return self.train_policy(self.global_batches(data))

    def make_data(self, local: types.RolloutBatch) -> tuple[Any, dict[str, Any]]:
        return self.generate_reinforce_data(local)

    def generate_reinforce_data(
        self, rollout_batch: types.RolloutBatch
    ) -> tuple[types.ReinforceTrainBatch, dict[str, Any]]:
        """Rewards less the KL, and their baselines, of this rank's samples: `(data, metrics)`; all
        ranks call it.

        The KL of a response is the mean over its tokens, as in NeMo-Aligner (in the paper it is
        the sum). The baseline is the mean of the prompt's other responses that ended; those that
        did not end train nothing (`calculate_rloo_baseline`).

        Args:
            rollout_batch: `response_tokens` int64 `[B, S]`; `response_lengths`, `prompt_lengths`,
                `idx` int64 `[B]`; `is_end` bool `[B]`; `rewards` f32 `[B]`; with a KL penalty
                `logprobs` and `init_logprobs` f32 `[B, S-1]`, with anything, NaN too, outside the
                response.
        """
        mask = response_mask(rollout_batch)
        rewards, is_end = rollout_batch["rewards"], rollout_batch["is_end"]
        kl = torch.zeros_like(mask)  # also outside the response
        if self.compute_init_policy_kl:
            columns = cast(Mapping[str, Tensor], rollout_batch)
            policy, reference = (
                torch.where(mask != 0, columns[key], 0) for key in ("logprobs", "init_logprobs")
            )
            kl = calculate_kl_penalty(policy, reference, self.cfg.use_absolute_kl)
        kl_of_responses = masked_sum(kl, mask, dim=1) / mask.sum(1).clamp(min=1)
        rewards_with_kl = rewards - self.cfg.initial_policy_kl_penalty * kl_of_responses

        # The other responses to a prompt may be on other ranks.
        gathered = ReinforceRolloutBatch(
            rewards=rewards_with_kl, idx=rollout_batch["idx"], valid=is_end & mask.bool().any(1)
        ).gather_and_balance_globally()
        baselines = calculate_rloo_baseline(
            gathered["idx"], gathered["rewards"].double(), gathered["valid"]
        ).to(rewards.dtype)
        advantages = torch.where(gathered["valid"], gathered["rewards"] - baselines, 0)
        metrics = {
            "init_policy_kl": ppo_data.mean_of_sample_means(kl, mask),
            "rewards_with_kl": ppo_data.mean_of_sample_means(
                rewards_with_kl[:, None].expand_as(mask), mask
            ),
            "fraction_of_prompts_without_signal": ppo_data.fraction_without_signal(
                advantages, gathered["idx"], gathered["valid"]
            ),
        }
        data: types.ReinforceTrainBatch = {
            "response_tokens": rollout_batch["response_tokens"],
            "is_end": is_end,
            "mask": mask,
            "rewards_with_kl": rewards_with_kl,
            "baseline": own_samples(baselines, len(rewards)),
        }
        return data, metrics

    @property
    def source_of_logprobs(self) -> str | None:
        return "recompute" if self.compute_init_policy_kl else None
