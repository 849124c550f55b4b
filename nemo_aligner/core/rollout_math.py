# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The mathematics of PPO rollouts: masks, rewards per transition, statistics, selection, seeds. No
ranks.

The estimators of advantages are in `nemo_aligner.core.advantages`, those of the KL divergence in
`nemo_aligner.core.kl`; both can be imported from here too.

Shapes: [B, S-1] is per transition, column t predicting token t+1; see `nemo_aligner.core.types`
for a worked picture. A mask is non-zero (or True) where a slot belongs to the response; elsewhere
a tensor may hold anything, NaN included.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Where NeMo-Aligner has them, and what belongs to them.
from nemo_aligner.core.advantages import (  # noqa: F401
    calculate_advantages_and_returns,
    calculate_grpo_advantages,
    calculate_reinforce_returns,
    calculate_rloo_advantages,
    calculate_rloo_baseline,
    clip_advantages,
    group_rows,
    spread_over_response,
)
from nemo_aligner.core.kl import (  # noqa: F401
    AdaptiveKLController,
    FixedKLController,
    calculate_kl_penalty,
)


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


def calculate_ppo_rewards(
    values: Tensor,
    rewards: Tensor,
    response_lengths: Tensor,
    init_policy_kl: Tensor | float,
    penalty_factor: float = 0.0,
) -> Tensor:
    """Reward per transition: the scalar reward at column R-2, minus the KL penalty at every
    column.

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


def clip_rewards(rewards: Tensor, limit: float | None) -> Tensor:
    """Scalar `rewards` [B] kept within [-limit, limit]; as they are if `limit` is None. NaN stays
    NaN.
    """
    return rewards if limit is None else rewards.clamp(-limit, limit)


def calculate_overlong_penalty(
    response_token_counts: Tensor, max_length: int, buffer_len: int, factor: float = 1.0
) -> Tensor:
    """Soft punishment of answers that come close to the length limit (Yu et al. 2025, DAPO,
    arXiv:2503.14476, eq. 13).

    With L tokens: 0 up to max_length - buffer_len, then falling evenly to -factor at max_length,
    -factor beyond:

        factor * clip((max_length - buffer_len - L) / buffer_len, -1, 0)

    Args:
        response_token_counts: int [B], R - P: tokens of the answers alone, end token included.
        max_length: L_max, the most tokens an answer can have.
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


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` (same shape) is non-zero, over all of it or along `dim`."""
    kept = torch.where(mask != 0, values, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` (same shape) is non-zero, over all of it or along `dim`; 0
    where nothing is.
    """
    keep = mask != 0
    kept = torch.where(keep, values, 0)
    if dim is None:
        return kept.sum() / keep.sum().clamp(min=1)
    return kept.sum(dim) / keep.sum(dim).clamp(min=1)


def masked_std(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Standard deviation (Bessel-corrected) where `mask` is non-zero, over all or along `dim`; 0
    below two values.
    """
    keep = mask != 0
    if dim is None:
        return masked_std(values.flatten(), keep.flatten(), 0)
    deviation = values - masked_mean(values, keep, dim).unsqueeze(dim)
    squares = torch.where(keep, deviation, 0).square().sum(dim)
    return (squares / (keep.sum(dim) - 1).clamp(min=1)).sqrt()


def masked_mean_var(
    values: Tensor, mask: Tensor, sum_over_dp: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance (not Bessel-corrected) over the slots of all ranks where `mask` is
    non-zero.

    Args:
        values: any shape; slots outside the mask may hold NaN.
        mask: same shape.
        sum_over_dp: sums a float64 tensor over the ranks; all of them call this function.

    Returns:
        Two float64 scalars; 0 if no slot counts anywhere.
    """
    keep = mask != 0
    kept = torch.where(keep, values.detach().double(), 0)
    total, count = sum_over_dp(torch.stack([kept.sum(), keep.sum(dtype=torch.float64)]))
    count = count.clamp(min=1)
    mean = total / count
    # A second pass over the deviations: E[x^2] - E[x]^2 would cancel.
    return mean, sum_over_dp(torch.where(keep, kept - mean, 0).square().sum()) / count


def whiten(
    values: Tensor,
    mask: Tensor,
    shift_mean: bool = True,
    sum_over_dp: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) with `masked_mean_var`, plus the mean again unless
    `shift_mean`.

    Token rewards are whitened without shifting their mean, as a reward that moves with the others
    of its batch would no longer say what is good (TRL does the same, with the Bessel-corrected
    variance).

    Args:
        values: any shape; slots outside the mask may hold NaN.
        mask: same shape, non-zero where a slot counts.
        shift_mean: False keeps the mean what it was.
        sum_over_dp: sums a float64 tensor over the ranks; all of them call this function.

    Returns:
        dtype and shape of `values`; 0 outside the mask.
    """
    mean, var = masked_mean_var(values, mask, sum_over_dp)
    whitened = (values.double() - mean) * torch.rsqrt(var + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask != 0, whitened, 0).to(values.dtype)


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


def select_topk(
    batch: dict[str, Tensor], num_select: int = 1, group_by: str = "prompt_tokens"
) -> dict[str, Tensor]:
    """Keep the `num_select` best rewarded rows of each prompt (all of a prompt that has fewer).

    Of equally rewarded rows the later ones are kept.

    Args:
        batch: every tensor has N rows; `rewards` is [N] or [N, 1].
        num_select: rows to keep for each prompt.
        group_by: the tensor, [N] or [N, P], that says which rows belong together (equal ones).
            Texts take a prompt that occurs twice in the data for one; the index in the data set
            (`idx`) does not.

    Returns:
        The kept rows of every tensor: prompts in sorted order of `group_by`, rewards ascending
        inside a prompt.

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
    """One output of SplitMix64 (Steele, Lea, Flood 2014) for each state; int64 arithmetic wraps
    like uint64's.
    """
    x = x - 0x61C8864680B583EB  # + 0x9E3779B97F4A7C15, as a signed number
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own `>>` copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
