# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Importance weights for samples of an engine that gives tokens other probabilities than the
trainer does: truncated (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl), and left out
beyond a range (Ling Team 2025, "IcePop", arXiv:2510.18855). Transitions are [B, S-1].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.core.surrogates import bounded_exp

# A smaller difference of one token's log-probs is rounding of float32 and counts as none, so that
# a sampler that is the trainer's own model changes no bit.
ROUNDING = 1e-4


@dataclass(frozen=True)
class SamplerCorrection:
    """The keys of `trainer.ppo.sampler_correction`. Levels: `CORRECTION_LEVELS`; None: off."""

    weights: str | None  # level of the importance weights
    cap: float  # of a weight
    reject: str | None  # level of the ratio that must stay within the range
    low: float
    high: float


def importance_ratios(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """p_trainer / p_sampler [B, S-1]: of each "token"; of its whole response ("sequence", the
    product), or the root of that ("geometric", the mean of a token). `log_ratio` [B, S-1] is log
    p_trainer - log p_sampler, 0 outside the mask.
    """
    log_ratio = torch.where(log_ratio.abs() > ROUNDING, log_ratio, 0)
    if level != "token":
        whole = log_ratio.sum(1, keepdim=True)
        if level == "geometric":
            whole = whole / mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = whole.expand_as(log_ratio)
    return bounded_exp(log_ratio)


def correction_factors(
    log_ratio: Tensor, mask: Tensor, settings: SamplerCorrection
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the advantages are multiplied with, [B, S-1]: min(weight, cap), or 0 where the ratio is
    out of range; and by name where it is so, for metrics: bool [B, S-1].
    """
    factors, where = torch.ones_like(log_ratio), {}
    if settings.weights is not None:
        weights = importance_ratios(log_ratio, mask, settings.weights)
        factors, where["capped"] = weights.clamp(max=settings.cap), weights > settings.cap
    if settings.reject is not None:
        ratios = importance_ratios(log_ratio, mask, settings.reject)
        where["rejected"] = (ratios < settings.low) | (ratios > settings.high)
        factors = torch.where(where["rejected"], 0, factors)
    return factors, where
