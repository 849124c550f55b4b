# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From a scored rollout to the data of the updates: rewards with KL, advantages, returns, and their metrics.

Shapes: B samples of a rollout on this rank, S padded length (prompt + response). Tensors per transition are
`[B, S-1]`; `nemo_aligner.types` has their alignment. A `group` is the data-parallel (DP) one: all its ranks call.
"""

from dataclasses import dataclass

import torch

from nemo_aligner.algorithms.rollouts import answer_mask
from nemo_aligner.utils.distributed import masked_global_mean_var, normalize_tensor
from nemo_aligner.utils.ppo_utils import (
    calculate_advantages_and_returns,
    calculate_kl_penalty,
    calculate_ppo_rewards,
)


@dataclass(frozen=True)
class DataSettings:
    """How rewards become advantages; the keys of `trainer.ppo` of the same names."""

    use_absolute_kl: bool
    discount_factor: float
    gae_lambda: float
    normalize_advantages: bool

    @classmethod
    def from_config(cls, cfg) -> "DataSettings":
        """Of `trainer.ppo`."""
        return cls(
            use_absolute_kl=cfg.use_absolute_kl,
            discount_factor=cfg.discount_factor,
            gae_lambda=cfg.gae_lambda,
            normalize_advantages=cfg.normalize_advantages,
        )


def make_ppo_data(rollout_batch, settings: DataSettings, kl_penalty: float, group=None) -> tuple[dict, dict]:
    """Training data of this rank's rows of a scored rollout: `(data, metrics)`; see `PPOTrainer.generate_ppo_data`.

    Args:
        rollout_batch: what `PPOTrainer._run_inference` describes; `init_logprobs` are needed with a KL penalty only.
            Slots outside the response may hold anything, NaN included.
        kl_penalty: beta.
    """
    mask = answer_mask(rollout_batch)
    is_response = mask.bool()
    values = torch.where(is_response, rollout_batch["values"], 0)
    logprobs = torch.where(is_response, rollout_batch["logprobs"], 0)

    if kl_penalty > 0:
        init_policy_kl = calculate_kl_penalty(
            log_probs_a=logprobs,
            log_probs_b=torch.where(is_response, rollout_batch["init_logprobs"], 0),
            use_absolute_kl=settings.use_absolute_kl,
        )
    else:
        init_policy_kl = torch.zeros_like(logprobs)
    rewards_with_kl = calculate_ppo_rewards(
        values,
        rollout_batch["rewards"],
        rollout_batch["response_lengths"],
        init_policy_kl,
        penalty_factor=kl_penalty,
    )
    advantages, returns = calculate_advantages_and_returns(
        values=values,
        rewards=rewards_with_kl,
        discount_factor=settings.discount_factor,
        gae_lambda=settings.gae_lambda,
        mask=mask,
    )
    metrics = compute_ppo_data_metrics(
        init_policy_kl=init_policy_kl,
        rewards_with_kl=rewards_with_kl,
        advantages=advantages,
        returns=returns,
        values=values,
        mask=mask,
        group=group,
    )
    if settings.normalize_advantages:
        advantages = normalize_tensor(advantages, mask, group=group)
    data = {
        "response_tokens": rollout_batch["response_tokens"],
        "is_end": rollout_batch["is_end"],
        "mask": mask,
        "advantages": advantages,
        "returns": returns,
        "values": values,
        "prev_logprobs": logprobs,
    }
    return data, metrics


def mean_of_sample_means(values: torch.Tensor, mask: torch.Tensor, group=None) -> float:
    """Mean over the samples of all DP ranks of each sample's masked mean; samples without a masked slot do not count.

    Args:
        values: `[B, S-1]`; slots outside the mask may hold anything, NaN included.
        mask: `[B, S-1]`, True where a slot counts.
        group: DP group; every rank of it calls this.
    """
    mask = mask.bool()
    count = mask.sum(-1)
    means = torch.where(mask, values, 0).sum(-1) / count.clamp(min=1)
    return float(masked_global_mean_var(means, count > 0, group=group)[0])


def compute_ppo_data_metrics(*, init_policy_kl, rewards_with_kl, advantages, returns, values, mask, group) -> dict:
    """Metrics of the training data of a rollout, over the response tokens of all DP ranks; all `[B, S-1]`."""
    metrics = {
        "init_policy_kl": mean_of_sample_means(init_policy_kl, mask, group),
        "rewards_with_kl": mean_of_sample_means(rewards_with_kl, mask, group),
    }
    for name, tensor in (("advantages", advantages), ("returns", returns), ("values", values)):
        mean, var = masked_global_mean_var(tensor, mask, group=group)
        metrics |= {f"{name}_mean": float(mean), f"{name}_std": float(var) ** 0.5}
    return metrics
