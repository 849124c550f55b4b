# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The few tokens that take most of a policy's entropy: those whose log-prob and advantage vary
together (Cui et al. 2025, arXiv:2505.22617). Pure functions, of the N samples of a whole rollout
in an order that does not depend on the split; tensors per transition are [N, S-1].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.core.masks import masked_mean
from nemo_aligner.core.tensors import sample_seeds


@dataclass(frozen=True)
class CovarianceSettings:
    """The keys of `trainer.ppo.covariance`."""

    rule: str | None  # one of `estimators.COVARIANCE_RULES`; None: off
    fraction: float  # of the tokens
    low: float  # Clip-Cov: range of the covariances to choose from
    high: float
    kl_coef: float  # KL-Cov: of the penalty


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log pi - mean)(A - mean) of each token, float64; means over the mask."""
    logprobs, advantages = logprobs.double(), advantages.double()
    return (logprobs - masked_mean(logprobs, mask)) * (advantages - masked_mean(advantages, mask))


def chosen_tokens(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    response_tokens: Tensor,
    settings: CovarianceSettings,
) -> Tensor:
    """bool [N, S-1]: a `fraction` of all tokens, one at least. With rule "clip" (Clip-Cov) drawn
    among those with a covariance in the range (maybe fewer), with "kl" (KL-Cov) the largest.
    `logprobs` are of the policy that generated, `advantages` of the updates; `response_tokens`
    int64 [N, S] seed the draw.
    """
    covariance, able = covariances(logprobs, advantages, mask), mask != 0
    count = max(1, int(settings.fraction * int(able.sum())))
    priority = covariance
    if settings.rule == "clip":
        able = able & (covariance >= settings.low) & (covariance <= settings.high)
        slots = torch.arange(mask.numel(), device=mask.device).view_as(mask)
        seed = int(sample_seeds(0, 0, response_tokens.flatten()).sum())
        priority = sample_seeds(seed, 0, slots).double()
    ordered = torch.where(able, priority, -torch.inf).flatten()
    order = ordered.argsort(descending=True, stable=True)
    chosen = torch.zeros_like(able).flatten()
    chosen[order[:count]] = True
    return chosen.view_as(able) & able
