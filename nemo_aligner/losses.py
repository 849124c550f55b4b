# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The losses, as pure functions of plain tensors: no ranks, no model, no config.

**One convention.** The loss of an optimizer step over the global batch is

    loss = sum over all rows and slots of  weights * per_slot_loss

with `weights` computed once per global batch by `loss_weights`, before anything is split. A loss function sees a
micro-batch with its rows of `weights` and returns a *partial sum*; so do its metrics. Summed over micro-batches and
data-parallel ranks they give the value, and the gradient, of the global batch, whatever the split was.

Shapes: per-transition tensors are [B, S-1] (see `nemo_aligner.types`), pairs are [B], attributes of a regression
reward model [B, A]. A slot of weight 0 may hold NaN: it changes neither values nor gradients.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LOSS_REDUCTIONS = ("token", "sequence", "microbatch")


def loss_weights(
    mask: Tensor,
    reduction: str = "token",
    micro_batch_size: int | None = None,
    sum_over_dp: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Tensor:
    """Weights that turn a sum over slots into the named mean over the global batch.

    Args:
        mask: [B, S-1], [B, A] or [B], non-zero where a slot counts; this data-parallel rank's whole share of the
            global batch.
        reduction: "token": mean over all counting slots of the global batch. "sequence": mean over rows of their own
            means; rows without a counting slot are left out. "microbatch": mean over micro-batches of their means (0
            for an empty one), which depends on the split; kept to compare with NeMo-Aligner.
        micro_batch_size: rows per micro-batch; used by "microbatch" only.
        sum_over_dp: sums a tensor over the data-parallel ranks; every one of them must call this function.

    Returns:
        float32, shape of `mask`; all zero if no slot counts on any rank.
    """
    keep = mask != 0
    rows = keep.reshape(keep.shape[0], -1)
    # float64 counts: a global batch can hold more tokens than float32 counts exactly (2**24).
    if reduction == "token":
        denominator = sum_over_dp(rows.sum(dtype=torch.float64))
    elif reduction == "sequence":
        denominator = sum_over_dp(rows.any(1).sum(dtype=torch.float64)).clamp(min=1) * _count(rows, 1)
    elif reduction == "microbatch":
        if not micro_batch_size or rows.shape[0] % micro_batch_size:
            raise ValueError(
                f"micro_batch_size={micro_batch_size} does not divide the {rows.shape[0]} rows of the batch"
            )
        splits = rows.reshape(rows.shape[0] // micro_batch_size, -1)
        dp_size = sum_over_dp(torch.ones((), dtype=torch.float64, device=mask.device))
        per_split = _count(splits, 1) * splits.shape[0] * dp_size
        denominator = per_split.repeat_interleave(micro_batch_size, dim=0)
    else:
        raise ValueError(f"loss_reduction={reduction!r} is unknown; choose one of {', '.join(LOSS_REDUCTIONS)}")
    weights = rows / denominator.clamp(min=1)
    return weights.float().reshape(mask.shape)


def ppo_actor_loss(
    *,
    logprobs: Tensor,
    prev_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    ratio_eps: float,
    entropy: Tensor | None = None,
    entropy_bonus: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7), minus an entropy bonus (eq. 9).

    With rho = exp(logprobs - prev_logprobs), per slot: max(-A rho, -A clamp(rho, 1-eps, 1+eps)) - bonus * H.

    Args:
        logprobs: [B, S-1], of the policy in training; carries the gradient.
        prev_logprobs: [B, S-1], of the policy that generated.
        advantages: [B, S-1].
        weights: [B, S-1], from `loss_weights`.
        ratio_eps: clip range.
        entropy: [B, S-1], per slot; needed when `entropy_bonus` is not 0.
        entropy_bonus: coefficient of the entropy.

    Returns:
        Partial sums: the loss, and metrics `loss`, `ppo_ratio`, `ppo_ratio_clamped` (weighted means of rho) and
        `scaled_entropy` (bonus times mean entropy).
    """
    ratio = (_kept(logprobs, weights) - _kept(prev_logprobs, weights)).exp()
    clamped = ratio.clamp(1.0 - ratio_eps, 1.0 + ratio_eps)
    advantages = _kept(advantages, weights)
    loss = (weights * torch.maximum(-advantages * ratio, -advantages * clamped)).sum()
    scaled_entropy = torch.zeros_like(loss)
    if entropy_bonus:
        if entropy is None:
            raise ValueError(f"entropy_bonus={entropy_bonus} needs the entropy of each slot")
        scaled_entropy = entropy_bonus * (weights * _kept(entropy, weights)).sum()
        loss = loss - scaled_entropy
    return loss, {
        "loss": loss.detach(),
        "ppo_ratio": (weights * ratio.detach()).sum(),
        "ppo_ratio_clamped": (weights * clamped.detach()).sum(),
        "scaled_entropy": scaled_entropy.detach(),
    }


def ppo_critic_loss(
    *, values: Tensor, prev_values: Tensor, returns: Tensor, weights: Tensor, loss_clip_val: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half squared error to the returns, the values kept within `loss_clip_val` of those at rollout time.

    Per slot: 0.5 * max((v_clipped - ret)^2, (v - ret)^2), v_clipped = prev + clamp(v - prev, -clip, clip).

    Args:
        values: [B, S-1], of the critic in training; carries the gradient.
        prev_values: [B, S-1], at rollout time.
        returns: [B, S-1].
        weights: [B, S-1], from `loss_weights`.
        loss_clip_val: None or <= 0 switches clipping off.

    Returns:
        Partial sums: the loss and the metric `loss`.
    """
    values, prev_values, returns = (_kept(x, weights) for x in (values, prev_values, returns))
    error = (values - returns).square()
    if loss_clip_val is not None and loss_clip_val > 0:
        clipped = prev_values + (values - prev_values).clamp(-loss_clip_val, loss_clip_val)
        error = torch.maximum((clipped - returns).square(), error)
    loss = 0.5 * (weights * error).sum()
    return loss, {"loss": loss.detach()}


def sft_loss(*, logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the weighted tokens (supervised fine-tuning, and the selected rollouts of RS).

    Args:
        logprobs: [B, S-1], carries the gradient.
        weights: [B, S-1], from `loss_weights`.

    Returns:
        Partial sums: the loss and the metric `loss`.
    """
    loss = -(weights * _kept(logprobs, weights)).sum()
    return loss, {"loss": loss.detach()}


def preference_loss(
    *, rewards_chosen: Tensor, rewards_rejected: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Bradley-Terry loss of pairs: -log sigmoid(chosen - rejected) (Ouyang et al. 2022, arXiv:2203.02155, eq. 1).

    Args:
        rewards_chosen: [B] or [B, 1], carries the gradient.
        rewards_rejected: [B] or [B, 1], carries the gradient.
        weights: [B], from `loss_weights`.

    Returns:
        Partial sums: the loss, and metrics `loss` and `acc` (share of pairs in the right order; a tie is not).
    """
    margin = _kept(rewards_chosen.reshape(-1), weights) - _kept(rewards_rejected.reshape(-1), weights)
    loss = -(weights * logsigmoid(margin)).sum()
    return loss, {"loss": loss.detach(), "acc": (weights * (margin.detach() > 0)).sum()}


def regression_loss(*, predictions: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean squared error of the attributes (Wang et al. 2024, arXiv:2406.08673), over the labels that count.

    Args:
        predictions: [B, A], carries the gradient.
        labels: [B, A].
        weights: [B, A], from `loss_weights`; 0 where there is no label.

    Returns:
        Partial sums: the loss and the metric `loss`.

    Raises:
        ValueError: the shapes differ; broadcasting would compare one attribute with another.
    """
    if not predictions.shape == labels.shape == weights.shape:
        raise ValueError(
            f"predictions, labels and weights of shapes {tuple(predictions.shape)}, {tuple(labels.shape)} and "
            f"{tuple(weights.shape)}: they must be equal"
        )
    loss = (weights * (_kept(predictions, weights) - _kept(labels, weights)).square()).sum()
    return loss, {"loss": loss.detach()}


def _kept(values: Tensor, weights: Tensor) -> Tensor:
    """float32 `values` where the weight is not 0, else 0: a selection, since 0 * NaN would stay NaN, backward too."""
    return torch.where(weights != 0, values.float(), 0.0)


def _count(keep: Tensor, dim: int) -> Tensor:
    """Number of True along `dim`, kept as a dimension; at least 1, so that it can divide."""
    return keep.sum(dim, keepdim=True, dtype=torch.float64).clamp(min=1)
