# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Kahneman-Tversky optimization (KTO): the loss of a policy that learns from single responses,
each of them desirable or not. Pure functions in the convention of `core/losses.py`: partial sums.

Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7 and 8 and section 4.1.

Shapes: B samples, per-transition tensors `[B, S-1]`. Slots outside the mask and samples of weight
0 may hold NaN.
"""

import math

import torch
from torch import Tensor

from nemo_aligner.core.losses import kept
from nemo_aligner.core.masks import masked_mean, masked_sum
from nemo_aligner.core.preference import likelihood_fall


def log_ratios(
    *,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    weights: Tensor,
    average_log_probs: bool = False,
) -> Tensor:
    """float32 `[B]`: r = log pi(response) - log pi_ref(response), a sum over the tokens of the
    response, or with `average_log_probs` their mean; 0 for a sample of weight 0.

    Args:
        logprobs, ref_logprobs: `[B, S-1]`, of the policy in training and of the reference.
        mask: `[B, S-1]`, non-zero on the tokens of the responses.
        weights: `[B]`, from `losses.loss_weights`.
    """
    reduce = masked_mean if average_log_probs else masked_sum
    return kept(reduce((logprobs - ref_logprobs).float(), mask, dim=1), weights)


def kto_loss(
    *,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    weights: Tensor,
    desirable: Tensor,
    reference_point: Tensor,
    beta: float,
    desirable_loss_weight: float = 1.0,
    undesirable_loss_weight: float = 1.0,
    average_log_probs: bool = False,
    preference_loss_weight: float = 1.0,
    sft_loss_weight: float = 0.0,
    sft_average_log_probs: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Preference loss of samples, plus the negative log-likelihood of the desirable responses.

    With r from `log_ratios`, z the reference point and s the logistic function, a sample costs

        desirable      desirable_loss_weight * (1 - s(beta (r - z)))
        undesirable    undesirable_loss_weight * (1 - s(beta (z - r)))

    and the loss is preference_loss_weight times the mean of that over all samples, plus
    sft_loss_weight times the mean of -log pi(response), in which an undesirable sample counts 0.

    Args:
        logprobs: `[B, S-1]`, carries the gradient.
        ref_logprobs, mask, weights, average_log_probs: see `log_ratios`.
        desirable: `[B]`, non-zero for a desirable response.
        reference_point: z, a scalar at least 0 without a gradient: how far the policy is from its
            reference on responses to other prompts (`average_log_probs` as here).
        beta: above 0.
        sft_average_log_probs: log pi(response) is a mean over tokens.

    Returns:
        Partial sums: the loss, and means over all samples: `loss`, `preference_loss`, `sft_loss`
        (both without their weights), `acc` (share of samples on their side of z; none is on it),
        and the sums that `kto_statistics` needs.
    """
    ratios = log_ratios(
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        mask=mask,
        weights=weights,
        average_log_probs=average_log_probs,
    )
    good = desirable != 0
    gains = torch.where(good, ratios - reference_point, reference_point - ratios)
    factors = torch.where(good, desirable_loss_weight, undesirable_loss_weight)
    # 1 - s(x) = s(-x), which keeps its digits where s(x) is near 1.
    preference = (weights * factors * torch.sigmoid(-beta * gains)).sum()

    def totals(average: bool) -> Tensor:
        reduce = masked_mean if average else masked_sum
        return kept(reduce(logprobs.float(), mask, dim=1), weights)

    sft = -(weights * good * totals(sft_average_log_probs)).sum()
    loss = preference_loss_weight * preference + sft_loss_weight * sft
    ratios, logps = ratios.detach(), totals(average_log_probs).detach()
    sums = log_ratios(
        logprobs=logprobs.detach(), ref_logprobs=ref_logprobs, mask=mask, weights=weights
    )
    return loss, {
        "loss": loss.detach(),
        "preference_loss": preference.detach(),
        "sft_loss": sft.detach(),
        "acc": (weights * (gains.detach() > 0)).sum(),
        "desirable_fraction": (weights * good).sum(),
        "undesirable_fraction": (weights * ~good).sum(),
        "rewards_chosen_sum": (weights * good * ratios).sum(),
        "rewards_rejected_sum": (weights * ~good * ratios).sum(),
        "rewards_square_mean": (weights * ratios.square()).sum(),
        "logprobs_chosen_sum": (weights * good * logps).sum(),
        "logprobs_rejected_sum": (weights * ~good * logps).sum(),
        "gains_chosen_sum": (weights * good * sums).sum(),
        "gains_rejected_sum": (weights * ~good * sums).sum(),
    }


def kto_statistics(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics to report, from those of `kto_loss` averaged over batches.

    Means over the desirable and over the undesirable samples (`rewards_chosen_mean`,
    `logprobs_rejected_mean`, ...), absent where there are none; `rewards_margin`, their
    difference, and `likelihood_fall` (`core.preference`); `rewards_all_mean` and
    `rewards_all_std` of all samples.
    """
    metrics = dict(metrics)
    fractions = {
        "chosen": metrics["desirable_fraction"],
        "rejected": metrics.pop("undesirable_fraction"),
    }
    mean = sum(metrics[f"rewards_{side}_sum"] for side in fractions)
    square = metrics.pop("rewards_square_mean")
    metrics["rewards_all_mean"] = mean
    metrics["rewards_all_std"] = math.sqrt(max(square - mean**2, 0.0))
    gains = [metrics.pop(f"gains_{side}_sum") for side in fractions]
    for side, fraction in fractions.items():
        for name in ("rewards", "logprobs"):
            total = metrics.pop(f"{name}_{side}_sum")
            if fraction > 0:
                metrics[f"{name}_{side}_mean"] = total / fraction
    if all(fraction > 0 for fraction in fractions.values()):
        chosen, rejected = metrics["rewards_chosen_mean"], metrics["rewards_rejected_mean"]
        metrics["rewards_margin"] = chosen - rejected
        means = [total / part for total, part in zip(gains, fractions.values(), strict=True)]
        metrics["likelihood_fall"] = likelihood_fall(*means)
    return metrics
