# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Scalar rewards: placed on the transitions, clipped, penalized, and used to select responses. No
ranks.

Shapes: `[B, S-1]` is per transition, column t predicts token t+1 (`nemo_aligner.core.types` has a
worked picture).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nemo_aligner.core.advantages import group_rows


def calculate_ppo_rewards(
    values: Tensor,
    rewards: Tensor,
    response_lengths: Tensor,
    init_policy_kl: Tensor | float,
    penalty_factor: float = 0.0,
    token_rewards: Tensor | None = None,
) -> Tensor:
    """Reward per transition: the scalar reward at column R-2 and the rewards of tokens where they
    are, minus the KL penalty at every column.

    Columns outside the response are penalized too; `calculate_advantages_and_returns` masks them.

    Args:
        values: [B, S-1]; only its shape, dtype and device matter.
        rewards: [B] or [B, 1], of the whole response.
        response_lengths: int [B], R.
        init_policy_kl: [B, S-1], or a number.
        penalty_factor: beta; 0 ignores the KL.
        token_rewards: [B, S-1], of single tokens, beside `rewards`.

    Returns:
        [B, S-1].
    """
    per_token = torch.zeros_like(values)
    last = (response_lengths.to(values.device).reshape(-1, 1) - 2).clamp(min=0)
    per_token.scatter_(1, last, rewards.to(per_token).reshape(-1, 1))
    if token_rewards is not None:
        per_token = per_token + token_rewards.to(per_token)
    if penalty_factor:
        per_token = per_token - penalty_factor * init_policy_kl
    return per_token


def reward_at_last_token(rewards: Tensor, response_lengths: Tensor, width: int) -> Tensor:
    """Scalar rewards [B] as rewards of tokens [B, S-1]: at column R-2, NaN elsewhere.

    Args:
        response_lengths: int [B], R.
        width: S.
    """
    placed = rewards.new_full((len(rewards), width - 1), float("nan"))
    last = (response_lengths.to(rewards.device).reshape(-1, 1) - 2).clamp(min=0)
    return placed.scatter_(1, last, rewards.reshape(-1, 1))


def add_token_rewards(parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Weighted sum [B, S-1] of the rewards of tokens that several sources give; NaN where none
    gives one.

    Args:
        parts: [B, S-1] by name, NaN where there is no reward.
        weights: by name.
    """
    stacked = torch.stack([weight * parts[name].double() for name, weight in weights.items()])
    total = stacked.nansum(0).masked_fill(stacked.isnan().all(0), float("nan"))
    return total.float()


def sums_of_steps(token_rewards: Tensor, scored: Tensor, mask: Tensor) -> Tensor:
    """Reward of each step: the sum over its tokens, at the column of the token that ends it.

    Args:
        token_rewards: [B, S-1], of every token (a KL penalty), and of steps where they end.
        scored: bool [B, S-1], True where a step ends.
        mask: [B, S-1], non-zero where a slot counts; elsewhere the others may hold anything.

    Returns:
        [B, S-1], 0 where no step ends. What follows the last step is in none.
    """
    ends = scored & (mask != 0)
    total = torch.where(mask != 0, token_rewards, 0).double().cumsum(1)
    # The total at the end before: totals are not monotonic, so it is looked up by its column.
    column = torch.arange(ends.shape[1], device=ends.device)
    last_end = torch.where(ends, column, -1).cummax(1).values
    before = torch.nn.functional.pad(last_end[:, :-1], (1, 0), value=-1)
    total_before = torch.where(before >= 0, total.gather(1, before.clamp(min=0)), 0)
    return torch.where(ends, total - total_before, 0).to(token_rewards.dtype)


def clip_rewards(rewards: Tensor, limit: float | None) -> Tensor:
    """Rewards, [B] of responses or [B, S-1] of tokens, clipped to [-limit, limit]; unchanged if
    `limit` is None. NaN stays NaN.
    """
    return rewards if limit is None else rewards.clamp(-limit, limit)


def calculate_overlong_penalty(
    response_token_counts: Tensor, max_length: int, buffer_len: int, factor: float = 1.0
) -> Tensor:
    """Soft penalty on responses close to the length limit (Yu et al. 2025, DAPO,
    arXiv:2503.14476, eq. 13).

    With L tokens: 0 up to max_length - buffer_len, then falling linearly to -factor at max_length,
    -factor beyond:

        factor * clip((max_length - buffer_len - L) / buffer_len, -1, 0)

    Args:
        response_token_counts: int [B], R - P: tokens of the responses, end tokens included.
        max_length: L_max, the most tokens a response can have.
        buffer_len: L_cache, length of the slope; 0 switches the penalty off.
        factor: of the penalty.

    Returns:
        float32 [B], to be added to the scalar rewards.

    Raises:
        ValueError: `buffer_len` is negative or above `max_length`.
    """
    if not 0 <= buffer_len <= max_length:
        raise ValueError(
            f"overlong_buffer_len={buffer_len} must be between 0 and max_length={max_length}"
        )
    beyond = response_token_counts.float() - (max_length - buffer_len)
    if not buffer_len:
        return torch.zeros_like(beyond)
    return -factor * (beyond / buffer_len).clamp(0.0, 1.0)


def select_topk(
    batch: dict[str, Tensor], num_select: int = 1, group_by: str = "prompt_tokens"
) -> dict[str, Tensor]:
    """Keep the `num_select` samples of each prompt with the highest rewards (all of a prompt that
    has fewer).

    Of samples with equal rewards the later ones are kept.

    Args:
        batch: every tensor has N samples; `rewards` is [N] or [N, 1].
        num_select: samples to keep for each prompt.
        group_by: name of the tensor, [N] or [N, P], that is equal for samples of one prompt. The
            tokens of the prompt confuse prompts that occur twice in the data; the index in the
            data set (`idx`) does not.

    Returns:
        The kept samples of every tensor: prompts in sorted order of `group_by`, rewards ascending
        within a prompt.

    Raises:
        ValueError: a reward is NaN, or `num_select` below 1.
    """
    if num_select < 1:
        raise ValueError(f"top_n_rollouts={num_select}: select at least 1 rollout for each prompt")
    rewards = batch["rewards"].flatten()
    if rewards.isnan().any():
        raise ValueError(
            f"the reward of rollout {int(rewards.isnan().nonzero()[0])} is NaN; cannot select the "
            "best"
        )
    group, size = group_rows(batch[group_by])
    order = torch.argsort(rewards, stable=True)
    order = order[torch.argsort(group[order], stable=True)]  # by prompt, and by reward inside
    stop = size.cumsum(0)[group[order]]
    position = torch.arange(len(order), device=order.device)
    chosen = order[position >= stop - num_select]
    return {key: tensor[chosen.to(tensor.device)] for key, tensor in batch.items()}
