# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The losses of a policy that learns from preference pairs directly, without a reward model, and
what is reported of pairs. Pure functions in the convention of `core/losses.py`: partial sums.

Shapes: B pairs; the 2B samples of the pairs stand in one tensor `[2B, S-1]`, rows 2b and 2b+1 are
the chosen and the rejected sample of pair b. Slots outside the mask and pairs of weight 0 may hold
NaN.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_aligner.core.estimators import DIRECT_PREFERENCE_LOSSES
from nemo_aligner.core.losses import kept
from nemo_aligner.core.masks import masked_mean, masked_sum


def interleave(chosen: Tensor, rejected: Tensor) -> Tensor:
    """[2B, ...]: the samples of a pair next to each other, so that micro-batches hold whole
    pairs.
    """
    return torch.stack([chosen, rejected], dim=1).flatten(0, 1)


def dpo_loss(
    *,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    weights: Tensor,
    beta: float,
    preference_loss: str = "dpo",
    label_smoothing: float = 0.0,
    average_log_probs: bool = False,
    reward_gaps: Tensor | None = None,
    preference_loss_weight: float = 1.0,
    sft_loss_weight: float = 0.0,
    sft_average_log_probs: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Preference loss of pairs, plus the negative log-likelihood of the chosen responses.

    The implicit reward of a sample is r = log pi(response) - log pi_ref(response), a sum over the
    tokens of the response, or with `average_log_probs` their mean. `pair_losses` has the losses of
    the difference of a pair.

        loss = preference_loss_weight * preference_loss - sft_loss_weight * log pi(chosen)

    Args:
        logprobs: [2B, S-1], of the policy in training; carries the gradient.
        ref_logprobs: [2B, S-1], of the reference policy.
        mask: [2B, S-1], non-zero on the tokens of the responses.
        weights: [B], from `losses.loss_weights`.
        beta, preference_loss, label_smoothing, reward_gaps: see `pair_losses`.
        sft_average_log_probs: log pi(chosen) is a mean over tokens too.

    Returns:
        Partial sums: the loss, and metrics, which are means over the pairs: `loss`,
        `preference_loss`, `sft_loss` (both without their weights), `acc` (share of pairs whose
        chosen response has the larger r; a tie does not), `logprobs_chosen_mean` and
        `logprobs_rejected_mean` (of the policy, as sums or means over tokens), those of
        `reward_sums` for r, and for `likelihood_fall` `gain_chosen` and `gain_rejected` (r as a
        sum over tokens, whatever the loss takes).
    """

    def pairs(values: Tensor, average: bool) -> tuple[Tensor, Tensor]:
        reduce = masked_mean if average else masked_sum
        chosen, rejected = reduce(values.float(), mask, dim=1).reshape(-1, 2).unbind(-1)
        return kept(chosen, weights), kept(rejected, weights)

    ratios = logprobs - ref_logprobs
    chosen, rejected = pairs(ratios, average_log_probs)
    losses = pair_losses(
        chosen - rejected,
        beta=beta,
        preference_loss=preference_loss,
        label_smoothing=label_smoothing,
        reward_gaps=None if reward_gaps is None else kept(reward_gaps, weights),
    )
    preference = (weights * losses).sum()
    sft = -(weights * pairs(logprobs, sft_average_log_probs)[0]).sum()
    loss = preference_loss_weight * preference + sft_loss_weight * sft
    logps = pairs(logprobs.detach(), average_log_probs)
    gains = pairs(ratios.detach(), average=False)
    chosen, rejected = chosen.detach(), rejected.detach()
    return loss, {
        "loss": loss.detach(),
        "preference_loss": preference.detach(),
        "sft_loss": sft.detach(),
        "acc": (weights * (chosen > rejected)).sum(),
        "logprobs_chosen_mean": (weights * logps[0]).sum(),
        "logprobs_rejected_mean": (weights * logps[1]).sum(),
        "gain_chosen": (weights * gains[0]).sum(),
        "gain_rejected": (weights * gains[1]).sum(),
        **reward_sums(chosen, rejected, weights),
    }


def likelihood_fall(gain_chosen: float, gain_rejected: float) -> float:
    """What chosen and rejected responses have both lost of the log-prob that the reference gives
    them, in nats per response: at least 0.
    """
    return max(0.0, -max(gain_chosen, gain_rejected))


def pair_losses(
    difference: Tensor,
    *,
    beta: float,
    preference_loss: str = "dpo",
    label_smoothing: float = 0.0,
    reward_gaps: Tensor | None = None,
) -> Tensor:
    """Loss of each pair. With d the difference of the implicit rewards, s the logistic function
    and g the gap between the rewards that the data give:

        dpo         -(1 - e) log s(beta d) - e log s(-beta d)   Rafailov et al. 2023,
                                                                arXiv:2305.18290, eq. 7
        ipo         (d - 1 / (2 beta))^2                        Azar et al. 2023,
                                                                arXiv:2310.12036, eq. 17
        rpo_sq      (beta d - g)^2                              Adler et al. 2024,
        rpo_bwd_kl  KL(s(g) || s(beta d))                       arXiv:2406.11704
        rpo_fwd_kl  KL(s(beta d) || s(g))

    e is `label_smoothing`, the probability that the two responses of a pair are exchanged.

    Args:
        difference: [B], carries the gradient.
        beta: above 0.
        preference_loss: one of `estimators.DIRECT_PREFERENCE_LOSSES`.
        label_smoothing: of dpo.
        reward_gaps: [B], needed by the losses rpo_*.

    Raises:
        ValueError: an unknown loss, or one that lacks the rewards.
    """
    logits = beta * difference
    if preference_loss == "dpo":
        return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    if preference_loss == "ipo":
        return (difference - 1 / (2 * beta)).square()
    if preference_loss not in DIRECT_PREFERENCE_LOSSES:
        raise ValueError(
            f"preference_loss={preference_loss!r} is unknown; choose one of "
            f"{', '.join(DIRECT_PREFERENCE_LOSSES)}"
        )
    if reward_gaps is None:
        raise ValueError(f"preference_loss={preference_loss!r} needs rewards of the data")
    if preference_loss == "rpo_sq":
        return (logits - reward_gaps).square()
    if preference_loss == "rpo_bwd_kl":
        return _kl_of_coins(reward_gaps, logits)
    return _kl_of_coins(logits, reward_gaps)


def _kl_of_coins(a: Tensor, b: Tensor) -> Tensor:
    """KL divergence of two distributions over {0, 1} with the log-odds `a` and `b`."""
    one = logsigmoid(a).exp() * (logsigmoid(a) - logsigmoid(b))
    return one + logsigmoid(-a).exp() * (logsigmoid(-a) - logsigmoid(-b))


def reward_sums(chosen: Tensor, rejected: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Partial sums of the rewards of pairs, all `[B]`, for `reward_statistics`."""
    chosen, rejected = kept(chosen.detach(), weights), kept(rejected.detach(), weights)
    squares = (chosen.square() + rejected.square()) / 2
    return {
        "rewards_chosen_mean": (weights * chosen).sum(),
        "rewards_rejected_mean": (weights * rejected).sum(),
        "rewards_square_mean": (weights * squares).sum(),
    }


def reward_statistics(metrics: dict[str, float]) -> None:
    """Replace the mean square of `reward_sums`, summed over the global batch, by the mean
    `rewards_all_mean` and the standard deviation `rewards_all_std` of all samples.
    """
    mean = (metrics["rewards_chosen_mean"] + metrics["rewards_rejected_mean"]) / 2
    square = metrics.pop("rewards_square_mean")
    metrics["rewards_all_mean"] = mean
    metrics["rewards_all_std"] = math.sqrt(max(square - mean**2, 0.0))
