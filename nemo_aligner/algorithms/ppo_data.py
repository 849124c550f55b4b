# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From a scored rollout to the data of the updates: rewards with KL, advantages, returns, metrics;
weights against a sampler that is not the trainer, and the tokens that Clip-Cov and KL-Cov treat
apart.

All data-parallel (DP) ranks call these functions. Shapes: B samples of a rollout on this rank, N
over all DP ranks, S padded length; per transition `[B, S-1]`, aligned as in
`nemo_aligner.core.types`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from omegaconf import DictConfig
from torch import Tensor

from nemo_aligner.algorithms.rollouts import PPORolloutBatch, own_samples, response_mask
from nemo_aligner.core import kl
from nemo_aligner.core.advantages import (
    RESPONSE_ESTIMATORS,
    TOKEN_ESTIMATORS,
    RunningMoments,
    calculate_grpo_step_advantages,
    calculate_overlong_penalty,
    calculate_ppo_rewards,
    calculate_reinforce_returns,
    clip_advantages,
    clip_rewards,
    group_rows,
    spread_over_response,
    sums_of_steps,
)
from nemo_aligner.core.estimators import ADVANTAGE_ESTIMATORS, AdvantageEstimator
from nemo_aligner.core.tensors import masked_mean, masked_sum
from nemo_aligner.core.types import PPOTrainBatch, RolloutBatch
from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import (
    all_reduce_dict,
    masked_global_mean_var,
    normalize_tensor,
)


@dataclass(frozen=True)
class DataSettings:
    """How rewards become advantages."""

    cfg: DictConfig  # `trainer.ppo`, complete (docs/ppo.md)
    # most tokens of a response; needed for the overlong penalty only
    max_response_length: int | None = None
    # a user's own estimator: (rewards, mask, prompts, values) of all ranks' samples to [N, S-1]
    advantages_of: Callable[..., Tensor] | None = None
    # of an ensemble's models, in the order of their names; needed for gdpo only
    reward_weights: Sequence[float] = ()

    @property
    def corrects_sampler(self) -> bool:
        correction = self.cfg.sampler_correction
        return correction.weights is not None or correction.reject is not None

    @property
    def estimator(self) -> AdvantageEstimator:
        return ADVANTAGE_ESTIMATORS[self.cfg.advantage_estimator]

    def rescaled_by(self) -> str | None:
        """The setting by which advantages have another scale than the rewards; None: the same."""
        if self.estimator.divides_by_std:
            return f"advantage_estimator={self.cfg.advantage_estimator}"
        if self.cfg.normalize_advantages and not self.estimator.compares_responses:
            return "normalize_advantages=True"
        return "whiten_rewards=True" if self.cfg.whiten_rewards else None


def harm_of_kl(setting: str, remedy: str) -> str:
    return (
        f"{setting}: in the reward this does not hold the policy to the reference, "
        f"however large initial_policy_kl_penalty is. Set {remedy}, unless you repeat "
        "an old run (docs/ppo.md)."
    )


def make_kl_controller(cfg: DictConfig) -> kl.FixedKLController | kl.AdaptiveKLController:
    if cfg.adaptive_kl is not None and cfg.adaptive_kl.enable:
        return kl.AdaptiveKLController(
            cfg.initial_policy_kl_penalty, cfg.adaptive_kl.target, cfg.adaptive_kl.horizon
        )
    return kl.FixedKLController(cfg.initial_policy_kl_penalty)


def make_ppo_data(
    rollout_batch: RolloutBatch, settings: DataSettings, kl_penalty: float
) -> tuple[PPOTrainBatch, dict[str, Any]]:
    """`(data, metrics)`; see `PPOTrainer.generate_ppo_data`. `kl_penalty`: beta, of the KL."""
    cfg = settings.cfg
    mask = response_mask(rollout_batch)
    columns = cast(dict[str, Tensor], rollout_batch)
    response = {
        key: torch.where(mask.bool(), columns[key], 0)
        for key in ("logprobs", "init_logprobs", "values", "teacher_logprobs")
        if key in columns
    }
    init_policy_kl = torch.zeros_like(response["logprobs"])
    if "init_logprobs" in response:
        init_policy_kl = kl.calculate_kl_penalty(
            response["logprobs"],
            response["init_logprobs"],
            cfg.use_absolute_kl,
            cfg.kl_estimator,
        )
    rewards, of_tokens, reward_metrics = shape_rewards(rollout_batch, mask, settings)
    token_rewards = calculate_ppo_rewards(
        response["logprobs"],
        rewards,
        rollout_batch["response_lengths"],
        init_policy_kl,
        penalty_factor=kl_penalty,
        token_rewards=of_tokens,
    )
    metrics = reward_metrics | {
        "init_policy_kl": mean_of_sample_means(init_policy_kl, mask),
        "init_policy_kl_per_sample": mean_of_sample_sums(init_policy_kl, mask),
        "rewards_with_kl": mean_of_sample_means(token_rewards, mask),
    }
    if cfg.whiten_rewards:
        token_rewards = normalize_tensor(token_rewards, mask, group=_dp_group(), shift_mean=False)

    learned, estimate_metrics = estimate_advantages(
        token_rewards, response.get("values"), rollout_batch, mask, settings
    )
    of_teacher, teacher_metrics = teach(response, mask, settings)
    learned["advantages"], clip_metrics = shape_advantages(
        learned["advantages"], of_teacher, mask, settings
    )
    more_metrics: dict[str, float] = {}
    if cfg.covariance.rule is not None:
        treated, more_metrics = treat_covariant_tokens(
            learned["advantages"], response["logprobs"], rollout_batch, mask, cfg.covariance
        )
        learned |= treated
    if "loss_multiplier" in rollout_batch:  # 0 is in the mask
        learned["advantages"] = learned["advantages"] * rollout_batch["loss_multiplier"][:, None]
    if settings.corrects_sampler:
        learned["advantages"], sampler_metrics = correct_for_sampler(
            learned["advantages"], rollout_batch, mask, cfg.sampler_correction
        )
        more_metrics = more_metrics | sampler_metrics
    data = {
        "response_tokens": rollout_batch["response_tokens"],
        "is_end": rollout_batch["is_end"],
        "mask": mask,
        "prev_logprobs": response["logprobs"],
        **{key: response[key] for key in ("values", "init_logprobs") if key in response},
        **learned,
    }
    metrics |= estimate_metrics | teacher_metrics | clip_metrics | more_metrics
    return cast(PPOTrainBatch, data), metrics


# --------------------------------------------------------------------------------------- rewards


def with_normalized_rewards(rollout_batch: RolloutBatch, moments: RunningMoments) -> RolloutBatch:
    """The samples with (reward - mean) / std by `moments`, to which those of all ranks are added
    before. Rewards of tokens are divided by std alone.
    """
    counts = response_mask(rollout_batch).any(1)
    gathered = PPORolloutBatch(
        rewards=rollout_batch["rewards"], counts=counts
    ).gather_and_balance_globally()
    moments.update(gathered["rewards"], gathered["counts"])
    changed = {"rewards": (rollout_batch["rewards"] - moments.mean) / moments.std}
    if "token_rewards" in rollout_batch:
        changed["token_rewards"] = rollout_batch["token_rewards"] / moments.std
    return cast(RolloutBatch, {**rollout_batch, **changed})


def shape_rewards(
    rollout_batch: RolloutBatch, mask: Tensor, settings: DataSettings
) -> tuple[Tensor, Tensor | None, dict[str, float]]:
    """Rewards clipped and less the penalty of overlong responses: of each response at its end,
    `[B]`, and of its tokens, `[B, S-1]`, or None; and metrics of that.
    """
    cfg, counts, metrics, of_tokens = settings.cfg, mask.bool().any(-1), {}, None
    given, where = rollout_batch["rewards"], counts
    if "token_rewards" in rollout_batch:  # they are in place of those of whole responses
        given, where = rollout_batch["token_rewards"], scored_tokens(rollout_batch, mask)
        metrics["rewards_per_response"] = mean_of_sample_sums(where.float(), mask)
        given = torch.where(where, given, 0)
    rewards = clip_rewards(given, cfg.reward_clip)
    if cfg.reward_clip is not None:
        metrics["fraction_of_rewards_clipped"] = mean_over_dp(rewards != given, where)
    if "token_rewards" in rollout_batch:
        rewards, of_tokens = torch.zeros_like(rollout_batch["rewards"]), rewards
    if cfg.overlong_buffer_len > 0:
        assert settings.max_response_length is not None
        penalty = calculate_overlong_penalty(
            rollout_batch["response_lengths"] - rollout_batch["prompt_lengths"],
            settings.max_response_length,
            cfg.overlong_buffer_len,
            cfg.overlong_penalty_factor,
        )
        rewards = rewards + penalty
        metrics["overlong_penalty"] = mean_over_dp(penalty, counts)
    return rewards, of_tokens, metrics


def scored_tokens(rollout_batch: RolloutBatch, mask: Tensor) -> Tensor:
    """bool `[B, S-1]`: True where a token of the response has a reward of its own."""
    return (mask != 0) & ~rollout_batch["token_rewards"].isnan()


# ------------------------------------------------------------------------------------ advantages


def estimate_advantages(
    token_rewards: Tensor,
    values: Tensor | None,
    rollout_batch: RolloutBatch,
    mask: Tensor,
    settings: DataSettings,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """What policy and critic learn from the rewards: `({"advantages"[, "returns"]}, metrics)`.

    Args:
        token_rewards: `[B, S-1]`, KL penalty included.
        values: `[B, S-1]`, or None: no critic.
    """
    cfg = settings.cfg
    metrics: dict[str, float] = {}
    if cfg.process_rewards == "steps" and "token_rewards" in rollout_batch:
        scored = scored_tokens(rollout_batch, mask)
        learned = {"advantages": compare_steps(token_rewards, rollout_batch["idx"], scored, mask)}
    elif settings.estimator.compares_responses:
        scores = masked_sum(token_rewards, mask, dim=1)
        estimator = RESPONSE_ESTIMATORS[cfg.advantage_estimator]
        if settings.estimator.compares_parts:
            scores = rollout_batch["reward_parts"]
            estimator = partial(estimator, weights=settings.reward_weights)
        advantages, metrics = compare_responses(scores, rollout_batch["idx"], mask, estimator)
        learned = {"advantages": advantages}
    else:
        advantages, returns = TOKEN_ESTIMATORS[cfg.advantage_estimator](
            values,
            token_rewards,
            cfg.discount_factor,
            cfg.gae_lambda,
            mask,
            cfg.critic_gae_lambda,
        )
        learned = {"advantages": advantages}
        if returns is not None and values is not None:
            learned["returns"] = returns
            metrics = _mean_and_std("returns", returns, mask)
            metrics |= _mean_and_std("values", values, mask)
    if settings.advantages_of is not None:
        learned["advantages"] = own_advantages(
            settings.advantages_of, token_rewards, values, rollout_batch["idx"], mask
        )
    return learned, _mean_and_std("advantages", learned["advantages"], mask) | metrics


def own_advantages(
    function: Callable[..., Tensor],
    token_rewards: Tensor,
    values: Tensor | None,
    idx: Tensor,
    mask: Tensor,
) -> Tensor:
    """Advantages `[B, S-1]` by a user's `function`, which gets the samples of all DP ranks, so
    that they do not depend on the split. `ValueError`: it returns another shape.
    """
    columns = {"rewards": token_rewards, "mask": mask, "prompts": idx}
    columns |= {} if values is None else {"values": values}
    gathered = PPORolloutBatch(columns).gather_and_balance_globally()
    advantages = function(**{"values": None, **gathered})
    if advantages.shape != gathered["rewards"].shape:
        raise ValueError(
            f"the advantages have the shape {list(advantages.shape)}, not that of the rewards, "
            f"{list(gathered['rewards'].shape)}"
        )
    return torch.where(mask.bool(), own_samples(advantages, len(idx)), 0)


def compare_responses(
    scores: Tensor, idx: Tensor, mask: Tensor, estimator: Callable[..., Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Advantages `[B, S-1]` of responses over the others to the same prompt, on any DP rank.

    Args:
        scores: `[B]` or `[B, K]`, of whole responses.
        idx: int64 `[B]`, dataset index: two prompts may have the same text.
        estimator: one of `RESPONSE_ESTIMATORS`.
    """
    gathered = PPORolloutBatch(
        scores=scores, idx=idx, valid=mask.bool().any(-1)
    ).gather_and_balance_globally()
    advantages = estimator(gathered["scores"], gathered["idx"], gathered["valid"])
    metrics = {
        "fraction_of_prompts_without_signal": fraction_without_signal(
            advantages, gathered["idx"], gathered["valid"]
        )
    }
    return spread_over_response(own_samples(advantages, len(scores)), mask), metrics


def fraction_without_signal(advantages: Tensor, idx: Tensor, valid: Tensor) -> float:
    """Share of the prompts whose valid responses all have an advantage of 0; args `[N]`."""
    group, size = group_rows(idx)

    def any_in_group(samples: Tensor) -> Tensor:
        return torch.zeros_like(size).index_add_(0, group, samples.to(size)) > 0

    without_signal = ~any_in_group(advantages != 0)
    return masked_mean(without_signal.double(), any_in_group(valid)).item()


def compare_steps(token_rewards: Tensor, idx: Tensor, scored: Tensor, mask: Tensor) -> Tensor:
    """Advantages `[B, S-1]` of GRPO with process supervision: sums of rewards over steps, compared
    with those of all steps to the same prompt, on any DP rank. `scored`: True where a step ends.
    """
    gathered = PPORolloutBatch(
        rewards=sums_of_steps(token_rewards, scored, mask), idx=idx, scored=scored, mask=mask
    ).gather_and_balance_globally()
    advantages = calculate_grpo_step_advantages(
        gathered["rewards"], gathered["idx"], gathered["scored"], gathered["mask"]
    )
    return own_samples(advantages, len(idx))


def teach(
    response: Mapping[Any, Tensor], mask: Tensor, settings: DataSettings
) -> tuple[Tensor | None, dict[str, float]]:
    """A teacher's advantages `[B, S-1]` (None without one), and metrics: of each token minus the
    log-ratio of policy and teacher, in expectation the reverse KL, with later tokens' discounted.
    """
    if "teacher_logprobs" not in response:
        return None, {}
    log_ratio = response["logprobs"] - response["teacher_logprobs"]
    metrics = {
        "teacher_kl": mean_of_sample_means(log_ratio, mask),
        "teacher_kl_per_sample": mean_of_sample_sums(log_ratio, mask),
    }
    to_come = calculate_reinforce_returns(-log_ratio, settings.cfg.teacher_kl_discount, mask)
    return settings.cfg.teacher_kl_coef * torch.where(mask.bool(), to_come, 0), metrics


def shape_advantages(
    advantages: Tensor, of_teacher: Tensor | None, mask: Tensor, settings: DataSettings
) -> tuple[Tensor, dict[str, float]]:
    """Advantages `[B, S-1]` normalized, with those of a teacher added, and clipped; and metrics.
    Those of compared responses and of a teacher have a scale of their own, so are not normalized.
    """
    if settings.cfg.normalize_advantages and not settings.estimator.compares_responses:
        advantages = normalize_tensor(advantages, mask, group=_dp_group())
    if of_teacher is not None:
        advantages = advantages + of_teacher
    if settings.cfg.advantage_clip is None:
        return advantages, {}
    clipped = clip_advantages(advantages, settings.cfg.advantage_clip)
    return clipped, {"fraction_of_advantages_clipped": mean_over_dp(clipped != advantages, mask)}


# --------------------------------------------------------------------------------------- metrics


def mean_of_sample_means(values: Tensor, mask: Tensor) -> float:
    """Mean over the samples of all DP ranks of each sample's masked mean; samples without a masked
    slot do not count. Args `[B, S-1]`; slots outside the mask may hold anything, NaN included.
    """
    count = (mask != 0).sum(-1)
    return mean_over_dp(masked_sum(values, mask, dim=-1) / count.clamp(min=1), count > 0)


def mean_of_sample_sums(values: Tensor, mask: Tensor) -> float:
    """As `mean_of_sample_means`, of each sample's masked sum."""
    return mean_over_dp(masked_sum(values, mask, dim=-1), (mask != 0).any(-1))


def _mean_and_std(name: str, values: Tensor, mask: Tensor) -> dict[str, float]:
    mean, var = masked_global_mean_var(values, mask, group=_dp_group())
    return {f"{name}_mean": float(mean), f"{name}_std": float(var) ** 0.5}


def _dp_group() -> Any:
    return parallel_state.get_data_parallel_group()


# ----------------------------------------------------------------------------------- corrections


def correct_for_sampler(
    advantages: Tensor, rollout_batch: RolloutBatch, mask: Tensor, settings: DictConfig
) -> tuple[Tensor, dict[str, float]]:
    """Advantages times their importance weights, and metrics of all ranks (docs/metrics.md).
    `rollout_batch` has `logprobs` and `sampling_logprobs`, anything outside the mask; `settings`
    are `trainer.ppo.sampler_correction`.
    """
    difference = rollout_batch["logprobs"] - rollout_batch["sampling_logprobs"]
    log_ratio = torch.where(mask.bool(), difference, 0)
    factors, where = kl.correction_factors(log_ratio, mask, **settings)
    level = settings.weights or settings.reject or "token"
    ratios = kl.importance_ratios(log_ratio, mask, level).double()  # a square must not overflow
    exact = log_ratio.double()  # the KLs of the built-in engine are those of its rounding
    means = {
        "sampler_weight_mean": ratios,
        "sampler_weight_squares": ratios.square(),
        "sampler_kl": exact.expm1() - exact,
        "sampler_kl_reverse": exact.exp() * (exact - 1) + 1,
        **{f"sampler_{name}": found.float() for name, found in where.items()},
    }
    metrics = {name: mean_over_dp(values, mask) for name, values in means.items()}
    squares = metrics.pop("sampler_weight_squares")
    mean = metrics["sampler_weight_mean"]
    metrics["sampler_effective_samples"] = mean**2 / squares if squares else 0.0
    largest = {"sampler_weight_max": torch.where(mask.bool(), ratios, 0).max()}
    metrics |= all_reduce_dict(largest, op=torch.distributed.ReduceOp.MAX)
    return advantages * factors, metrics


def treat_covariant_tokens(
    advantages: Tensor,
    logprobs: Tensor,
    rollout_batch: RolloutBatch,
    mask: Tensor,
    settings: DictConfig,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """`advantages`, 0 for the tokens that Clip-Cov chooses; with KL-Cov also `old_kl_coefs` f32
    `[B, S-1]`, each token's weight of the KL to the policy that generated; and metrics of all
    ranks. `rollout_batch` has `sample_order`, `response_tokens` and `is_end`; tokens of responses
    that were cut off are no candidates. `settings` are `trainer.ppo.covariance`.
    """
    mask = mask * rollout_batch["is_end"][:, None]  # by default the loss has no others
    columns = {"logprobs": logprobs, "advantages": advantages, "mask": mask}
    columns |= {key: rollout_batch[key] for key in ("sample_order", "response_tokens")}
    gathered = PPORolloutBatch(**columns).gather_and_balance_globally()
    gathered = gathered.select(gathered.pop("sample_order").argsort())  # at any split the same
    rule = {key: settings[key] for key in ("rule", "fraction", "low", "high")}
    arguments: dict[str, Any] = {**gathered, **rule}
    chosen = kl.chosen_tokens(**arguments)[rollout_batch["sample_order"]]
    metrics = {"fraction_of_covariant_tokens": mean_over_dp(chosen.float(), mask)}
    if settings.rule == "clip":
        return {"advantages": torch.where(chosen, 0, advantages)}, metrics
    coefs = settings.kl_coef * chosen.to(advantages)
    return {"advantages": advantages, "old_kl_coefs": coefs}, metrics


def mean_over_dp(values: Tensor, mask: Tensor) -> float:
    return float(masked_global_mean_var(values, mask, parallel_state.get_data_parallel_group())[0])
