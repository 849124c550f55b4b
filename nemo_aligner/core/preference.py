# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The losses of a policy that learns from judged responses: preference pairs (DPO, IPO, RPO),
single responses (KTO) or attributes (SteerLM 2.0). Partial sums, as in `core/losses.py`.

Shapes: B pairs, samples or prompts; the 2B samples of pairs stand in one tensor `[2B, S-1]`, rows
2b and 2b+1 are the chosen and the rejected sample of pair b. Slots outside the mask and rows of
weight 0 may hold NaN.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_aligner.core.errors import unknown
from nemo_aligner.core.estimators import DIRECT_PREFERENCE_LOSSES
from nemo_aligner.core.losses import kept
from nemo_aligner.core.tensors import masked_mean, masked_sum


def interleave(chosen: Tensor, rejected: Tensor) -> Tensor:
    """[2B, ...]: the samples of a pair side by side, so that micro-batches hold whole pairs."""
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

        loss = preference_loss_weight * preference_loss - sft_loss_weight * log pi(chosen)

    The implicit reward of a sample is r = log pi(response) - log pi_ref(response), a sum over the
    tokens of the response, or with `average_log_probs` their mean; see `pair_losses`.

    Args:
        logprobs: [2B, S-1], of the policy in training; carries the gradient.
        ref_logprobs: [2B, S-1], of the reference.
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
        both = weights.repeat_interleave(2)
        chosen, rejected = _of_responses(values, mask, both, average).reshape(-1, 2).unbind(-1)
        return chosen, rejected

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
    """Nats per response that both kinds have lost against the reference: at least 0."""
    return max(0.0, -max(gain_chosen, gain_rejected))


def pair_losses(
    difference: Tensor,
    *,
    beta: float,
    preference_loss: str = "dpo",
    label_smoothing: float = 0.0,
    reward_gaps: Tensor | None = None,
) -> Tensor:
    """Loss [B] of each pair. With d the `difference` of the implicit rewards, s the logistic
    function and g the gap between the rewards that the data give (`reward_gaps` [B]):

        dpo         -(1 - e) log s(beta d) - e log s(-beta d)   Rafailov et al. 2023,
                                                                arXiv:2305.18290, eq. 7
        ipo         (d - 1 / (2 beta))^2                        Azar et al. 2023,
                                                                arXiv:2310.12036, eq. 17
        rpo_sq      (beta d - g)^2                              Adler et al. 2024,
        rpo_bwd_kl  KL(s(g) || s(beta d))                       arXiv:2406.11704
        rpo_fwd_kl  KL(s(beta d) || s(g))

    e is `label_smoothing`, the probability that the two responses of a pair are exchanged.
    `ValueError`: an unknown loss, or one that lacks the rewards.
    """
    logits = beta * difference
    if preference_loss == "dpo":
        return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)
    if preference_loss == "ipo":
        return (difference - 1 / (2 * beta)).square()
    if preference_loss not in DIRECT_PREFERENCE_LOSSES:
        raise unknown("preference_loss", preference_loss, DIRECT_PREFERENCE_LOSSES)
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
    """Replace the mean square of `reward_sums` by `rewards_all_mean` and `rewards_all_std`."""
    both = metrics["rewards_chosen_mean"] + metrics["rewards_rejected_mean"]
    _mean_and_deviation(metrics, both / 2)


def _mean_and_deviation(metrics: dict[str, float], mean: float) -> None:
    square = metrics.pop("rewards_square_mean")
    metrics["rewards_all_mean"] = mean
    metrics["rewards_all_std"] = math.sqrt(max(square - mean**2, 0.0))


# ------------------------------------------ single responses, each of them desirable or not (KTO)


def log_ratios(
    *,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    weights: Tensor,
    average_log_probs: bool = False,
) -> Tensor:
    """float32 `[B]`: r = log pi(response) - log pi_ref(response), a sum over the tokens of the
    response, or with `average_log_probs` their mean; 0 for a sample of weight 0. `mask` `[B, S-1]`
    is non-zero on the tokens of the responses, `weights` `[B]` are from `losses.loss_weights`.
    """
    return _of_responses(logprobs - ref_logprobs, mask, weights, average_log_probs)


def _of_responses(values: Tensor, mask: Tensor, weights: Tensor, average: bool) -> Tensor:
    reduce = masked_mean if average else masked_sum
    return kept(reduce(values.float(), mask, dim=1), weights)


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
        sft_average_log_probs: log pi(response) is a mean over tokens.

    Returns partial sums: the loss, and means over all samples: `loss`, `preference_loss`,
    `sft_loss` (both without their weights), `acc` (share of samples on their side of z; none is on
    it), and the sums that `kto_statistics` needs.
    """
    ratios = _of_responses(logprobs - ref_logprobs, mask, weights, average_log_probs)
    good = desirable != 0
    gains = torch.where(good, ratios - reference_point, reference_point - ratios)
    factors = torch.where(good, desirable_loss_weight, undesirable_loss_weight)
    # 1 - s(x) = s(-x), which keeps its digits where s(x) is near 1.
    preference = (weights * factors * torch.sigmoid(-beta * gains)).sum()
    totals = _of_responses(logprobs, mask, weights, sft_average_log_probs)
    sft = -(weights * good * totals).sum()
    loss = preference_loss_weight * preference + sft_loss_weight * sft
    ratios, logprobs = ratios.detach(), logprobs.detach()
    logps = _of_responses(logprobs, mask, weights, average_log_probs)
    sums = _of_responses(logprobs - ref_logprobs, mask, weights, average=False)
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
    """Metrics to report, from those of `kto_loss` averaged over batches: means over the desirable
    and over the undesirable samples (`rewards_chosen_mean`, `logprobs_rejected_mean`, ...), absent
    where there are none; `rewards_margin`; `likelihood_fall`; `rewards_all_mean`, `_std`.
    """
    metrics = dict(metrics)
    good, bad = metrics["desirable_fraction"], metrics.pop("undesirable_fraction")
    fractions = {"chosen": good, "rejected": bad}
    _mean_and_deviation(metrics, sum(metrics[f"rewards_{side}_sum"] for side in fractions))
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


# ---------------------------------------------------- responses by their attributes (SteerLM 2.0)


class PromptWeights(NamedTuple):
    """What a batch of prompts gives."""

    # float64 `[B]`: divergence by the mean tokens of a prompt's responses; 0 if none counts
    losses: Tensor
    divergences: Tensor  # float64 `[B]`, without that division
    # float32 `[B, n]`, c_i such that sum_i c_i * log Q(y_i|a,x) has the gradient of `losses`; 0
    # for a response that does not count
    factors: Tensor


def target_weights(log_p_attributes: Tensor, log_p_response: Tensor, log_q: Tensor) -> Tensor:
    """float64 `[..., n]`: softmax over n of log P(a|x,y) + log P(y|x) - log Q'(y|a,x)."""
    return torch.softmax((log_p_attributes.double() + log_p_response - log_q), -1)


def prompt_weights(
    log_policy: Tensor, log_q: Tensor, targets: Tensor, tokens: Tensor
) -> PromptWeights:
    """Losses of prompts and the factors of their gradient, from log Q(y|a,x) of the policy in
    training (no gradient is needed), log Q'(y|a,x) and `target_weights`, all `[B, n]`; `tokens`
    `[B, n]`: how many log_policy is the sum over; 0: the response does not count.
    """
    counts = tokens > 0
    some = counts.any(1, keepdim=True)
    ratios = torch.where(counts, log_policy.double() - log_q.double(), -torch.inf)
    # A row of -inf has no softmax.
    log_weights = torch.log_softmax(torch.where(some, ratios, 0.0), 1)
    wanted = torch.where(counts, targets.double(), 0.0)
    terms = torch.xlogy(wanted, wanted) - torch.where(counts, wanted * log_weights, 0.0)
    divergences = terms.sum(1)
    mean_tokens = (tokens.double().sum(1) / counts.sum(1).clamp(min=1)).clamp(min=1)
    factors = torch.where(counts, log_weights.exp() - wanted, 0.0)
    return PromptWeights(
        losses=divergences / mean_tokens,
        divergences=divergences,
        factors=(factors / mean_tokens.unsqueeze(1)).float(),
    )
