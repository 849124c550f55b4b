# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators (GAE with a critic; REINFORCE returns, RLOO and GRPO without one) and the
rewards that they start from. Torch only, no ranks.

Shapes: [B, S-1] is per transition, see `nemo_aligner.core.types`. N is the number of samples that
are compared within their groups; gather them first if several ranks hold samples of one group. A
mask is non-zero where a slot, or a sample, counts; elsewhere a tensor may hold anything, also NaN.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nemo_aligner.core.tensors import masked_std


def calculate_advantages_and_returns(
    values: Tensor,
    rewards: Tensor,
    discount_factor: float,
    gae_lambda: float,
    mask: Tensor | None = None,
    critic_gae_lambda: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, each [B, S-1] (GAE, Schulman et al. 2015, arXiv:1506.02438, eq. 16).

        delta_t = r_t + gamma * v_{t+1} - v_t
        A_t = delta_t + gamma * lambda * A_{t+1}
        return_t = A_t + v_t

    Values and rewards outside the mask are replaced by 0 *before* the recursion, or a critic's
    value after the end token would be bootstrapped into every advantage of the sample. Prompt
    columns receive an advantage too; only the loss mask removes it. Slots between masked ones,
    where the policy reads an observation, are no steps: t+1 is the next slot that counts.

    Args:
        values, mask: [B, S-1]; mask from `create_mask`, None: every slot counts.
        rewards: [B, S-1], from `calculate_ppo_rewards`.
        critic_gae_lambda: lambda of the returns; None: `gae_lambda` (decoupled GAE, Yuan et al.
            2025, arXiv:2503.01491: at 1.0 the critic's targets are not biased by its own values).
    """
    if mask is not None:
        keep = mask != 0
        # A selection, not a product: 0 * NaN is NaN.
        values, rewards = torch.where(keep, values, 0), torch.where(keep, rewards, 0)
        skipped = ~keep & (keep.cumsum(1) > 0)
    else:
        skipped = torch.zeros_like(values, dtype=torch.bool)
    advantages = _gae(values, rewards, skipped, discount_factor, gae_lambda)
    if critic_gae_lambda is None or critic_gae_lambda == gae_lambda:
        return advantages, advantages + values
    of_critic = _gae(values, rewards, skipped, discount_factor, critic_gae_lambda)
    return advantages, of_critic + values


def _gae(
    values: Tensor, rewards: Tensor, skipped: Tensor, discount_factor: float, gae_lambda: float
) -> Tensor:
    """Advantages [B, S-1]; slots that are `skipped` are no steps: they have those of the next."""
    advantages = torch.zeros_like(values)
    next_advantage = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + discount_factor * next_value - values[:, t]
        advantage = delta + discount_factor * gae_lambda * next_advantage
        next_advantage = torch.where(skipped[:, t], next_advantage, advantage)
        next_value = torch.where(skipped[:, t], next_value, values[:, t])
        advantages[:, t] = next_advantage
    return advantages


def calculate_reinforce_returns(
    rewards: Tensor, discount_factor: float, mask: Tensor | None = None
) -> Tensor:
    """Discounted sum [B, S-1] of the rewards to come: G_t = sum over k >= t of gamma^(k-t) r_k;
    arguments as of `calculate_advantages_and_returns`, and so are prompt columns.

    From token rewards with a KL penalty, and normalized over the global batch, these are the
    advantages of REINFORCE++ (Hu et al. 2025, arXiv:2501.03262).
    """
    # GAE with lambda 1 and no critic: v = 0 everywhere.
    return calculate_advantages_and_returns(
        torch.zeros_like(rewards), rewards, discount_factor, 1.0, mask
    )[0]


def calculate_rloo_baseline(prompts: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Leave-one-out baseline [N] (Ahmadian et al. 2024, arXiv:2402.14740): mean `reward` [N] of
    the prompt's *other* valid samples; for a sample without one its own, so its advantage is 0.
    `prompts` int [N] or [N, P]: equal entries belong to one prompt. `mask` [N]: non-zero if valid.
    """
    group, size = group_rows(prompts)
    valid = (mask != 0).to(reward.dtype)
    gained = torch.where(mask != 0, reward, 0)
    total = torch.zeros_like(size, dtype=reward.dtype).index_add_(0, group, gained)[group] - gained
    others = torch.zeros_like(size, dtype=reward.dtype).index_add_(0, group, valid)[group] - valid
    return torch.where(others > 0, total / others.clamp(min=1), reward)


def calculate_rloo_advantages(
    scores: Tensor, prompts: Tensor, mask: Tensor | None = None
) -> Tensor:
    """REINFORCE leave-one-out: score minus `calculate_rloo_baseline`; arguments as of
    `calculate_grpo_advantages`. Returns [N], dtype of `scores`; 0 without valid companion.
    """
    valid = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask != 0
    kept = torch.where(valid, scores, 0).double()
    return torch.where(valid, kept - calculate_rloo_baseline(prompts, kept, valid), 0).to(
        scores.dtype
    )


def calculate_grpo_advantages(
    scores: Tensor,
    prompts: Tensor,
    mask: Tensor | None = None,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantages (Shao et al. 2024, arXiv:2402.03300, section 4.1.2): (score -
    mean) / (std + eps), with mean and deviation (Bessel-corrected) of the prompt's valid samples.
    `normalize_std` False leaves the division out (Liu et al. 2025, arXiv:2503.20783, "Dr. GRPO").

    `scores` [N] are of whole responses, KL penalty included; `prompts` and `mask` as for
    `calculate_rloo_baseline`, mask None: all valid. Returns [N], dtype of `scores`; 0 for samples
    that are not valid or without valid companion, and where a prompt's scores are equal.
    """
    valid = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask != 0
    deviation, std = _deviations(scores.unsqueeze(1), valid.unsqueeze(1), prompts)
    if normalize_std:
        deviation = deviation / (std + eps)
    return deviation.squeeze(1).to(scores.dtype)


def _deviations(values: Tensor, valid: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Of `values` [N, K]: the deviations from the mean of all that are valid of a prompt, 0 where
    one is not, and their standard deviation [N, 1]. float64: the mean of equal float32 scores must
    be that score, or eps magnifies rounding.
    """
    group, size = group_rows(prompts)

    def group_sum(x: Tensor) -> Tensor:
        sums = torch.zeros_like(size, dtype=torch.float64).index_add_(0, group, x.sum(1))
        return sums[group].unsqueeze(1)

    count = group_sum(valid.double())
    kept = torch.where(valid, values, 0).double()
    deviation = torch.where(valid, kept - group_sum(kept) / count.clamp(min=1), 0)
    return deviation, (group_sum(deviation.square()) / (count - 1).clamp(min=1)).sqrt()


def calculate_gdpo_advantages(
    parts: Tensor, prompts: Tensor, mask: Tensor, weights: Sequence[float], eps: float = 1e-6
) -> Tensor:
    """Group reward-decoupled normalization (Liu et al. 2026, arXiv:2601.05242): the GRPO advantage
    of each reward, their weighted sum, and that divided by its deviation over all valid samples. A
    reward that varies little then counts as much as one that varies much.

    `parts` [N, K]: rewards of whole responses, one column each, with K `weights`; `eps` is added
    to each deviation. Returns [N], dtype of `parts`, with mean 0 over the samples of each prompt;
    0 for samples that are not valid.
    """
    each = [calculate_grpo_advantages(part.double(), prompts, mask, eps=eps) for part in parts.T]
    total = torch.stack(each, dim=1) @ parts.new_tensor(weights, dtype=torch.float64)
    return (total / (masked_std(total, mask) + eps)).to(parts.dtype)


def calculate_grpo_step_advantages(
    rewards: Tensor, prompts: Tensor, scored: Tensor, mask: Tensor, eps: float = 1e-6
) -> Tensor:
    """Group-relative advantages with process supervision (Shao et al. 2024, arXiv:2402.03300,
    section 4.1.3): the rewards of all steps of all responses to a prompt are normalized together,
    (reward - mean) / (std + eps), and the advantage of a token is the sum of the normalized
    rewards of the steps that end with it or later. A response of more steps counts more in mean
    and standard deviation (Bessel-corrected).

    Args:
        rewards: [N, S-1], of the steps, at the columns of the tokens that end them.
        prompts: int [N] or [N, P]; equal entries belong to one prompt.
        scored, mask: [N, S-1], True where a step has a reward, where a slot counts.

    Returns [N, S-1], dtype of `rewards`; 0 outside the mask, after the last step, and where the
    steps of a prompt number fewer than two or have equal rewards.
    """
    valid = (scored != 0) & (mask != 0)
    deviation, std = _deviations(rewards, valid, prompts)
    normalized = deviation / (std + eps)
    to_come = normalized.flip(1).cumsum(1).flip(1)
    # A difference of sums is not exact: after the last step there is nothing to come.
    later = valid.flip(1).cumsum(1).flip(1) > 0
    return torch.where(later & (mask != 0), to_come, 0).to(rewards.dtype)


def spread_over_response(scores: Tensor, mask: Tensor) -> Tensor:
    """[B, S-1]: each sample's score, [B] or [B, 1], on its response's transitions, 0 elsewhere."""
    return torch.where(mask != 0, scores.reshape(-1, 1), 0)


def group_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Group of each row (int64 [N]; equal rows share one, in sorted order), size of each group."""
    _, group, size = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    return group, size


# ---------------------------------------------------------------------- estimators by their name


# From rewards per transition: (values [B, S-1] or None, rewards [B, S-1], gamma, lambda, mask
# [B, S-1], lambda of the returns) to advantages and returns [B, S-1], the target of the critic;
# None without one.
TOKEN_ESTIMATORS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "gae": calculate_advantages_and_returns,
    "reinforce_plus_plus": lambda _values, rewards, gamma, _lambda, mask, _of_returns: (
        calculate_reinforce_returns(rewards, gamma, mask),
        None,
    ),
    "teacher": lambda _values, rewards, *_: (torch.zeros_like(rewards), None),
}

# From one score per response (gdpo: several), by comparison with the other responses to its
# prompt: (scores [N], prompt of each [N], mask [N]) to advantages [N].
RESPONSE_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "rloo": calculate_rloo_advantages,
    "grpo": calculate_grpo_advantages,
    "dr_grpo": partial(calculate_grpo_advantages, normalize_std=False),
    "gdpo": calculate_gdpo_advantages,
}


# ---------------------------------------------------------------------------------------- rewards


def calculate_ppo_rewards(
    values: Tensor,
    rewards: Tensor,
    response_lengths: Tensor,
    init_policy_kl: Tensor | float,
    penalty_factor: float = 0.0,
    token_rewards: Tensor | None = None,
) -> Tensor:
    """Reward per transition [B, S-1]: the scalar reward at column R-2 and the rewards of tokens
    where they are, minus `penalty_factor` times the KL at every column, also outside the response
    (which `calculate_advantages_and_returns` masks).

    Args:
        values: [B, S-1]; only its shape, dtype and device matter.
        rewards: [B] or [B, 1], of the whole response.
        response_lengths: int [B], R.
        init_policy_kl: [B, S-1], or a number; a `penalty_factor` of 0 ignores it.
        token_rewards: [B, S-1], of single tokens, beside `rewards`.
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
    """Scalar rewards [B] at column R-2 of [B, S-1], NaN elsewhere; `response_lengths` [B]: R."""
    placed = rewards.new_full((len(rewards), width - 1), float("nan"))
    last = (response_lengths.to(rewards.device).reshape(-1, 1) - 2).clamp(min=0)
    return placed.scatter_(1, last, rewards.reshape(-1, 1))


def add_token_rewards(parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Weighted sum [B, S-1] of the sources' token rewards [B, S-1]; NaN where none gives one."""
    stacked = torch.stack([weight * parts[name].double() for name, weight in weights.items()])
    total = stacked.nansum(0).masked_fill(stacked.isnan().all(0), float("nan"))
    return total.float()


def sums_of_steps(token_rewards: Tensor, scored: Tensor, mask: Tensor) -> Tensor:
    """Reward of each step [B, S-1]: the sum over its tokens, at the column of the token that ends
    it, 0 elsewhere. What follows the last step is in none.

    Args:
        token_rewards: [B, S-1], of every token (a KL penalty), and of steps where they end.
        scored: bool [B, S-1], True where a step ends.
        mask: [B, S-1], non-zero where a slot counts; elsewhere the others may hold anything.
    """
    ends = scored & (mask != 0)
    total = torch.where(mask != 0, token_rewards, 0).double().cumsum(1)
    # The total at the end before: totals are not monotonic, so it is looked up by its column.
    column = torch.arange(ends.shape[1], device=ends.device)
    last_end = torch.where(ends, column, -1).cummax(1).values
    before = torch.nn.functional.pad(last_end[:, :-1], (1, 0), value=-1)
    total_before = torch.where(before >= 0, total.gather(1, before.clamp(min=0)), 0)
    return torch.where(ends, total - total_before, 0).to(token_rewards.dtype)


@dataclass
class RunningMoments:
    """Mean and variance of all rewards so far, in float64 (Chan, Golub, LeVeque 1983)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean

    def update(self, rewards: Tensor, mask: Tensor) -> None:
        """Add `rewards` [N] where `mask` [N] is non-zero: those of all ranks, on each rank."""
        added = rewards[mask != 0].double().sort().values  # sums do not depend on the order
        if not len(added):
            return
        shift, total = added.mean().item() - self.mean, self.count + len(added)
        self.squares += (added - added.mean()).square().sum().item()
        self.squares += shift**2 * self.count * len(added) / total
        self.mean += shift * len(added) / total
        self.count = total

    @property
    def std(self) -> float:
        """Of the rewards so far (Bessel-corrected); 1 while they are all the same."""
        return (self.squares / max(self.count - 1, 1)) ** 0.5 or 1.0


def clip_rewards(rewards: Tensor, limit: float | None) -> Tensor:
    """Rewards [B] or [B, S-1] clipped to [-limit, limit]; None: as they are. NaN stays NaN."""
    return rewards if limit is None else rewards.clamp(-limit, limit)


clip_advantages = clip_rewards  # of advantages [B, S-1] that are normalized


def calculate_overlong_penalty(
    response_token_counts: Tensor, max_length: int, buffer_len: int, factor: float = 1.0
) -> Tensor:
    """Soft penalty, float32 [B], to be added to the scalar rewards of responses close to the
    length limit (Yu et al. 2025, DAPO, arXiv:2503.14476, eq. 13). With L = `response_token_counts`
    int [B] (R - P, end tokens included), and 0 if `buffer_len` is 0:

        factor * clip((max_length - buffer_len - L) / buffer_len, -1, 0)
    """
    beyond = response_token_counts.float() - (max_length - buffer_len)
    if not buffer_len:
        return torch.zeros_like(beyond)
    return -factor * (beyond / buffer_len).clamp(0.0, 1.0)


def select_topk(
    batch: dict[str, Tensor], num_select: int = 1, group_by: str = "prompt_tokens"
) -> dict[str, Tensor]:
    """Keep the `num_select` samples of each prompt with the highest rewards (all of a prompt that
    has fewer); of samples with equal rewards the later ones.

    Args:
        batch: every tensor has N samples; `rewards` is [N] or [N, 1].
        group_by: name of the tensor, [N] or [N, P], that is equal for samples of one prompt. The
            tokens of the prompt confuse prompts that occur twice in the data; `idx` does not.

    Returns the kept samples: prompts in sorted order of `group_by`, rewards ascending within a
    prompt. `ValueError`: a reward is NaN.
    """
    rewards = batch["rewards"].flatten()
    if rewards.isnan().any():
        number = int(rewards.isnan().nonzero()[0])
        raise ValueError(f"the reward of rollout {number} is NaN; cannot select the best")
    group, size = group_rows(batch[group_by])
    order = torch.argsort(rewards, stable=True)
    order = order[torch.argsort(group[order], stable=True)]  # by prompt, and by reward inside
    stop = size.cumsum(0)[group[order]]
    position = torch.arange(len(order), device=order.device)
    chosen = order[position >= stop - num_select]
    return {key: tensor[chosen.to(tensor.device)] for key, tensor in batch.items()}
