# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From a scored rollout to the data of the updates: rewards with KL, advantages, returns, and
their metrics.

Shapes: B samples of a rollout on this rank, N over all data-parallel (DP) ranks, S padded length
(prompt + response). Tensors per transition are `[B, S-1]`; `nemo_aligner.core.types` has their
alignment. All DP ranks call these functions.
"""

from dataclasses import dataclass

import torch

from nemo_aligner.algorithms.rollouts import PPORolloutBatch, answer_mask
from nemo_aligner.core.advantages import (
    calculate_advantages_and_returns,
    calculate_grpo_advantages,
    calculate_reinforce_returns,
    calculate_rloo_advantages,
    clip_advantages,
    group_rows,
    spread_over_response,
)
from nemo_aligner.core.kl import AdaptiveKLController, FixedKLController, calculate_kl_penalty
from nemo_aligner.core.masks import masked_mean, masked_sum
from nemo_aligner.core.rewards import (
    calculate_overlong_penalty,
    calculate_ppo_rewards,
    clip_rewards,
)
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import masked_global_mean_var, normalize_tensor

# Of the answers to one prompt, each with one score: [N] scores, groups and validity to [N]
# advantages.
GROUP_ESTIMATORS = {"rloo": calculate_rloo_advantages, "grpo": calculate_grpo_advantages}


@dataclass(frozen=True)
class DataSettings:
    """How rewards become advantages: the keys of `trainer.ppo` of the same names (docs/ppo.md).

    Attributes:
        max_response_length: most tokens of an answer; needed for the overlong penalty only.
    """

    discount_factor: float
    gae_lambda: float
    normalize_advantages: bool
    use_absolute_kl: bool = True
    kl_estimator: str | None = None
    advantage_estimator: str = "gae"
    critic_gae_lambda: float | None = None
    advantage_clip: float | None = None
    reward_clip: float | None = None
    whiten_rewards: bool = False
    overlong_buffer_len: int = 0
    overlong_penalty_factor: float = 1.0
    max_response_length: int | None = None

    @classmethod
    def from_config(cls, cfg, max_response_length: int | None = None) -> "DataSettings":
        """Of `trainer.ppo`. A configuration written before a variant existed does not have its
        keys.
        """
        names = [name for name in cls.__dataclass_fields__ if name in cfg]
        return cls(**{name: cfg[name] for name in names}, max_response_length=max_response_length)

    @property
    def uses_critic(self) -> bool:
        return self.advantage_estimator == "gae"


def make_kl_controller(cfg) -> FixedKLController | AdaptiveKLController:
    """Of the weight of the KL penalty, as `trainer.ppo` says."""
    adaptive = cfg.get("adaptive_kl") or {}
    if adaptive.get("enable", False):
        return AdaptiveKLController(
            cfg.initial_policy_kl_penalty, adaptive.target, adaptive.horizon
        )
    return FixedKLController(cfg.initial_policy_kl_penalty)


def make_ppo_data(rollout_batch, settings: DataSettings, kl_penalty: float) -> tuple[dict, dict]:
    """Training data of this rank's rows of a scored rollout: `(data, metrics)`; see
    `PPOTrainer.generate_ppo_data`.

    Args:
        rollout_batch: what `PPOTrainer._run_inference` describes; with `values` if the estimator
            uses a critic, and with `init_logprobs` if there is a KL to measure. Slots outside the
            response may hold anything.
        kl_penalty: beta, the weight of the KL in the reward.
    """
    mask = answer_mask(rollout_batch)
    response = {
        key: torch.where(mask.bool(), rollout_batch[key], 0)
        for key in ("logprobs", "init_logprobs", "values")
        if key in rollout_batch
    }
    init_policy_kl = torch.zeros_like(response["logprobs"])
    if "init_logprobs" in response:
        init_policy_kl = calculate_kl_penalty(
            response["logprobs"],
            response["init_logprobs"],
            settings.use_absolute_kl,
            settings.kl_estimator,
        )
    rewards, reward_metrics = shape_rewards(rollout_batch, mask, settings)
    token_rewards = calculate_ppo_rewards(
        response["logprobs"],
        rewards,
        rollout_batch["response_lengths"],
        init_policy_kl,
        penalty_factor=kl_penalty,
    )
    metrics = reward_metrics | {
        "init_policy_kl": mean_of_sample_means(init_policy_kl, mask),
        "init_policy_kl_per_sample": mean_of_sample_sums(init_policy_kl, mask),
        "rewards_with_kl": mean_of_sample_means(token_rewards, mask),
    }
    if settings.whiten_rewards:
        token_rewards = normalize_tensor(token_rewards, mask, group=_dp_group(), shift_mean=False)

    learnt, learnt_metrics = estimate_advantages(
        token_rewards, response.get("values"), rollout_batch, mask, settings
    )
    metrics |= learnt_metrics
    learnt["advantages"], clip_metrics = shape_advantages(learnt["advantages"], mask, settings)
    data = {
        "response_tokens": rollout_batch["response_tokens"],
        "is_end": rollout_batch["is_end"],
        "mask": mask,
        "prev_logprobs": response["logprobs"],
        **{key: response[key] for key in ("values", "init_logprobs") if key in response},
        **learnt,
    }
    return data, metrics | clip_metrics


# ----------------------------------------------------------------------------------------- rewards


def shape_rewards(
    rollout_batch, mask: torch.Tensor, settings: DataSettings
) -> tuple[torch.Tensor, dict]:
    """Rewards `[B]` of the whole answers, clipped and less the penalty of overlong ones; and
    metrics of that.
    """
    counts, metrics = mask.bool().any(-1), {}
    rewards = clip_rewards(rollout_batch["rewards"], settings.reward_clip)
    if settings.reward_clip is not None:
        metrics["fraction_of_rewards_clipped"] = _mean(rewards != rollout_batch["rewards"], counts)
    if settings.overlong_buffer_len > 0:
        penalty = calculate_overlong_penalty(
            rollout_batch["response_lengths"] - rollout_batch["prompt_lengths"],
            settings.max_response_length,
            settings.overlong_buffer_len,
            settings.overlong_penalty_factor,
        )
        rewards = rewards + penalty
        metrics["overlong_penalty"] = _mean(penalty, counts)
    return rewards, metrics


# -------------------------------------------------------------------------------------- advantages


def estimate_advantages(
    token_rewards: torch.Tensor, values, rollout_batch, mask: torch.Tensor, settings: DataSettings
) -> tuple[dict, dict]:
    """What policy and critic learn of the rewards: `({"advantages"[, "returns"]}, metrics)`.

    Args:
        token_rewards: `[B, S-1]`, KL penalty included.
        values: `[B, S-1]`, or None: no critic.
    """
    metrics = {}
    if settings.uses_critic:
        advantages, returns = calculate_advantages_and_returns(
            values=values,
            rewards=token_rewards,
            discount_factor=settings.discount_factor,
            gae_lambda=settings.gae_lambda,
            mask=mask,
            critic_gae_lambda=settings.critic_gae_lambda,
        )
        learnt = {"advantages": advantages, "returns": returns}
        metrics = _mean_and_std("returns", returns, mask) | _mean_and_std("values", values, mask)
    elif settings.advantage_estimator == "reinforce_plus_plus":
        learnt = {
            "advantages": calculate_reinforce_returns(
                token_rewards, settings.discount_factor, mask
            )
        }
    else:
        learnt, metrics = compare_answers(
            masked_sum(token_rewards, mask, dim=1),
            rollout_batch["idx"],
            mask,
            settings.advantage_estimator,
        )
    return learnt, _mean_and_std("advantages", learnt["advantages"], mask) | metrics


def compare_answers(
    scores: torch.Tensor, idx: torch.Tensor, mask: torch.Tensor, estimator: str
) -> tuple[dict, dict]:
    """Advantages of answers over the others to the same prompt, which may be on other DP ranks;
    see above.

    Args:
        scores: `[B]`, of whole answers.
        idx: int64 `[B]`, dataset index: what the answers to one prompt have in common, as texts
            may occur twice.
        estimator: a key of `GROUP_ESTIMATORS`.
    """
    rows = PPORolloutBatch(
        scores=scores, idx=idx, valid=mask.bool().any(-1)
    ).gather_and_balance_globally()
    advantages = GROUP_ESTIMATORS[estimator](rows["scores"], rows["idx"], rows["valid"])
    group, size = group_rows(rows["idx"])

    def any_in_group(rows_: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(size).index_add_(0, group, rows_.to(size)) > 0

    without_signal = ~any_in_group(advantages != 0)
    metrics = {
        "fraction_of_prompts_without_signal": masked_mean(
            without_signal.double(), any_in_group(rows["valid"])
        ).item()
    }
    first = parallel_state.get_data_parallel_rank() * len(scores)  # every rank has as many rows
    return {
        "advantages": spread_over_response(advantages[first : first + len(scores)], mask)
    }, metrics


def shape_advantages(
    advantages: torch.Tensor, mask: torch.Tensor, settings: DataSettings
) -> tuple[torch.Tensor, dict]:
    """Advantages `[B, S-1]` normalized and clipped, and metrics of that.

    Those of a group of answers are not normalized: they have a scale of their own.
    """
    if settings.normalize_advantages and settings.advantage_estimator not in GROUP_ESTIMATORS:
        advantages = normalize_tensor(advantages, mask, group=_dp_group())
    if settings.advantage_clip is None:
        return advantages, {}
    clipped = clip_advantages(advantages, settings.advantage_clip)
    return clipped, {"fraction_of_advantages_clipped": _mean(clipped != advantages, mask)}


# ----------------------------------------------------------------------------------------- metrics


def mean_of_sample_means(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean over the samples of all DP ranks of each sample's masked mean; samples without a masked
    slot do not count.

    Args:
        values: `[B, S-1]`; slots outside the mask may hold anything, NaN included.
        mask: `[B, S-1]`, non-zero where a slot counts.
    """
    count = (mask != 0).sum(-1)
    return _mean(masked_sum(values, mask, dim=-1) / count.clamp(min=1), count > 0)


def mean_of_sample_sums(values: torch.Tensor, mask: torch.Tensor) -> float:
    """As `mean_of_sample_means`, of each sample's masked sum."""
    return _mean(masked_sum(values, mask, dim=-1), (mask != 0).any(-1))


def _mean_and_std(name: str, values: torch.Tensor, mask: torch.Tensor) -> dict:
    mean, var = masked_global_mean_var(values, mask, group=_dp_group())
    return {f"{name}_mean": float(mean), f"{name}_std": float(var) ** 0.5}


def _mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    return float(masked_global_mean_var(values, mask, group=_dp_group())[0])


def _dp_group():
    return parallel_state.get_data_parallel_group()
