# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The mathematics of PPO rollouts: masks, KL penalty, rewards per transition, GAE, selection, seeds. No ranks.

Shapes: [B, S-1] is per transition, column t predicting token t+1; see `nemo_aligner.types` for a worked picture. A
mask is non-zero (or True) where a slot belongs to the response; elsewhere a tensor may hold anything, NaN included.
"""

import torch
from torch import Tensor


def create_mask(values: Tensor, prompt_lengths: Tensor, response_lengths: Tensor) -> Tensor:
    """Mask of the response's transitions: 1 on columns [P-1, R-1), which is R-P ones.

    Args:
        values: [B, S-1]; only its shape, dtype and device matter.
        prompt_lengths: int [B], P.
        response_lengths: int [B], R, the total length.

    Returns:
        [B, S-1], dtype of `values`.
    """
    column = torch.arange(values.shape[1], device=values.device)
    start = prompt_lengths.to(values.device).reshape(-1, 1) - 1
    stop = response_lengths.to(values.device).reshape(-1, 1) - 1
    return ((column >= start) & (column < stop)).to(values.dtype)


def calculate_kl_penalty(log_probs_a: Tensor, log_probs_b: Tensor, use_absolute_kl: bool = True) -> Tensor:
    """One-sample estimate of KL(a || b) per transition: log_probs_a - log_probs_b, or its absolute value. [B, S-1]."""
    kl = log_probs_a - log_probs_b
    return kl.abs() if use_absolute_kl else kl


def calculate_ppo_rewards(
    values: Tensor,
    rewards: Tensor,
    response_lengths: Tensor,
    init_policy_kl: Tensor | float,
    penalty_factor: float = 0.0,
) -> Tensor:
    """Reward per transition: the scalar reward at column R-2, minus the KL penalty at every column.

    Columns outside the response are penalised too; `calculate_advantages_and_returns` masks them.

    Args:
        values: [B, S-1]; only its shape, dtype and device matter.
        rewards: [B] or [B, 1], of the whole response.
        response_lengths: int [B], R.
        init_policy_kl: [B, S-1], or a number.
        penalty_factor: beta; with 0 the KL is not looked at.

    Returns:
        [B, S-1].
    """
    per_token = torch.zeros_like(values)
    last = (response_lengths.to(values.device).reshape(-1, 1) - 2).clamp(min=0)
    per_token.scatter_(1, last, rewards.to(per_token).reshape(-1, 1))
    if penalty_factor:
        per_token = per_token - penalty_factor * init_policy_kl
    return per_token


def calculate_advantages_and_returns(
    values: Tensor, rewards: Tensor, discount_factor: float, gae_lambda: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

        delta_t = r_t + gamma * v_{t+1} - v_t,    A_t = delta_t + gamma * lambda * A_{t+1},    return_t = A_t + v_t

    Values and rewards outside the mask are replaced by 0 *before* the recursion: a critic's value after the end token
    would otherwise be bootstrapped into every advantage of the row. Prompt columns receive an advantage too; only the
    loss mask removes it.

    Args:
        values: [B, S-1].
        rewards: [B, S-1], from `calculate_ppo_rewards`.
        discount_factor: gamma.
        gae_lambda: lambda.
        mask: [B, S-1] from `create_mask`, or None: every slot counts.

    Returns:
        Advantages and returns, each [B, S-1].
    """
    if mask is not None:
        keep = mask != 0
        # A selection, not a product: 0 * NaN is NaN.
        values, rewards = torch.where(keep, values, 0), torch.where(keep, rewards, 0)
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + discount_factor * next_value - values[:, t]
        next_advantage = delta + discount_factor * gae_lambda * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` (same shape) is non-zero, over all of it or along `dim`; 0 where nothing is."""
    keep = mask != 0
    kept = torch.where(keep, values, 0)
    if dim is None:
        return kept.sum() / keep.sum().clamp(min=1)
    return kept.sum(dim) / keep.sum(dim).clamp(min=1)


def masked_std(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Standard deviation (Bessel-corrected) where `mask` is non-zero, over all or along `dim`; 0 below two values."""
    keep = mask != 0
    if dim is None:
        return masked_std(values.flatten(), keep.flatten(), 0)
    deviation = values - masked_mean(values, keep, dim).unsqueeze(dim)
    squares = torch.where(keep, deviation, 0).square().sum(dim)
    return (squares / (keep.sum(dim) - 1).clamp(min=1)).sqrt()


def calculate_entropy(log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Entropy over the last dimension.

    Args:
        log_probs: [B, S, V], normalised; -inf is a probability of 0.
        mask: [B, S]; if given, the result is the masked mean.

    Returns:
        [B, S], or a scalar with `mask`.
    """
    finite = torch.where(log_probs == -torch.inf, 0.0, log_probs)
    entropy = -(log_probs.exp() * finite).sum(-1)
    return entropy if mask is None else masked_mean(entropy, mask)


def select_topk(batch: dict[str, Tensor], num_select: int = 1, group_by: str = "prompt_tokens") -> dict[str, Tensor]:
    """Keep the `num_select` best rewarded rows of each prompt (all of a prompt that has fewer).

    Of equally rewarded rows the later ones are kept.

    Args:
        batch: every tensor has N rows; `rewards` is [N] or [N, 1].
        num_select: rows to keep for each prompt.
        group_by: the tensor, [N] or [N, P], that says which rows belong together (equal ones). Texts take a prompt
            that occurs twice in the data for one; the index in the data set (`idx`) does not.

    Returns:
        The kept rows of every tensor: prompts in sorted order of `group_by`, rewards ascending inside a prompt.

    Raises:
        ValueError: a reward is NaN, or `num_select` below 1.
    """
    if num_select < 1:
        raise ValueError(f"top_n_rollouts={num_select}: select at least 1 rollout for each prompt")
    rewards = batch["rewards"].flatten()
    if rewards.isnan().any():
        raise ValueError(f"the reward of rollout {int(rewards.isnan().nonzero()[0])} is NaN; cannot select the best")
    group, size = _groups(batch[group_by])
    order = torch.argsort(rewards, stable=True)
    order = order[torch.argsort(group[order], stable=True)]  # by prompt, and by reward inside
    stop = size.cumsum(0)[group[order]]
    position = torch.arange(len(order), device=order.device)
    chosen = order[position >= stop - num_select]
    return {key: tensor[chosen.to(tensor.device)] for key, tensor in batch.items()}


def calculate_rloo_baseline(prompts: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740): mean reward of the prompt's *other* valid rows.

    Args:
        prompts: int [N, P]; identical rows belong together.
        reward: [N].
        mask: [N], non-zero where a row is valid.

    Returns:
        [N]; a row without a valid other row gets its own reward (so its advantage is 0).
    """
    group, size = _groups(prompts)
    valid = (mask != 0).to(reward.dtype)
    gained = torch.where(mask != 0, reward, 0)
    total = torch.zeros_like(size, dtype=reward.dtype).index_add_(0, group, gained)[group] - gained
    others = torch.zeros_like(size, dtype=reward.dtype).index_add_(0, group, valid)[group] - valid
    return torch.where(others > 0, total / others.clamp(min=1), reward)


def _groups(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(group of each row [N], size of each group): equal rows share a group; groups are in sorted order."""
    _, group, size = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    return group, size


def sample_seeds(seed: int, step: int, idx: Tensor) -> Tensor:
    """A seed for each sample's own random stream, from (seed, step, index in the data set) alone.

    The text of a sample then does not depend on the rank, batch or row it is generated in.

    Args:
        seed: of the run.
        step: of training, so that a prompt that comes back is answered anew.
        idx: int64 [B].

    Returns:
        int64 [B], in [0, 2**63).
    """
    state = torch.full_like(idx, seed, dtype=torch.int64)
    state = _splitmix64(_splitmix64(state) + step)
    return _splitmix64(state + idx) & 0x7FFFFFFFFFFFFFFF


def _splitmix64(x: Tensor) -> Tensor:
    """One output of SplitMix64 (Steele, Lea, Flood 2014) for each state; int64 arithmetic wraps like uint64's."""
    x = x - 0x61C8864680B583EB  # + 0x9E3779B97F4A7C15, as a signed number
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own `>>` copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
