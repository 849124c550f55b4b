# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What the log-probs that two policies give sampled tokens decide: the KL divergence, and the
controllers of its coefficient; then what tokens lose by their importance ratios: PPO's clipped
surrogate, and what others put in its place; corrections for a sampler that is not the trainer; the
tokens that take most of the entropy. Torch only, no ranks. [B, S-1] is per transition, see
`nemo_aligner.core.types`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_aligner.core.estimators import KL_ESTIMATORS
from nemo_aligner.core.tensors import masked_mean, sample_seeds

# Ziegler et al. 2019 move beta by at most this share (times n / horizon) in one update.
_MAX_RELATIVE_ERROR = 0.2
# A larger exponent says nothing more of the divergence, and its squares or sums overflow float32.
_MAX_K3_EXPONENT = 20.0


def name_kl_estimator(use_absolute_kl: bool, estimator: str | None) -> str:
    """`estimator`, or if it is None the one that NeMo-Aligner's flag means: "abs" or "k1"."""
    return ("abs" if use_absolute_kl else "k1") if estimator is None else estimator


def calculate_kl_penalty(
    log_probs_a: Tensor,
    log_probs_b: Tensor,
    use_absolute_kl: bool = True,
    estimator: str | None = None,
) -> Tensor:
    """One-sample estimate of KL(a || b) per transition, for tokens that were drawn from a.

    With k1 = log_probs_a - log_probs_b (J. Schulman, "Approximating KL divergence", 2020):

        "k1"   k1                    unbiased; single estimates may be negative
        "abs"  |k1|                  biased, never negative
        "k2"   k1^2 / 2              biased (little where a is close to b), never negative
        "k3"   exp(-k1) - 1 + k1     unbiased, never negative; the exponent is at most 20

    In a reward, with a the policy in training, only "k1" regularises: the update is then the
    gradient of E[reward] - beta KL(a || b). The others also punish a token that is rarer than in
    b, and so make it rarer still, down to probability 0.

    In a loss, what matters is the expected gradient over tokens drawn from a. It is, for "k1": 0,
    so the term adds only noise; for "abs": the gradient of sum |a - b| over the vocabulary, twice
    the total variation; for "k2": the gradient of KL(a || b) of this token, without what it does
    to later ones; for "k3": likewise of KL(b || a). See Tang and Munos 2025, arXiv:2506.09477, and
    Liu et al. 2025, arXiv:2510.01555; `tests/unit/test_kl_optimum.py` derives and measures it.

    All tensors are [B, S-1]. `estimator`: one of `KL_ESTIMATORS`, else `ValueError`; None: "abs"
    or "k1" by `use_absolute_kl`, whose default is NeMo-Aligner's, not the configuration's.
    """
    estimator = name_kl_estimator(use_absolute_kl, estimator)
    k1 = log_probs_a - log_probs_b
    if estimator == "k1":
        return k1
    if estimator == "abs":
        return k1.abs()
    if estimator == "k2":
        return 0.5 * k1.square()
    if estimator == "k3":
        # expm1: for policies that hardly differ, exp(-k1) - 1 would be rounding error.
        return torch.expm1((-k1).clamp(max=_MAX_K3_EXPONENT)) + k1
    raise ValueError(
        f"KL estimator {estimator!r} is unknown; choose one of {', '.join(KL_ESTIMATORS)}"
    )


class FixedKLController:
    """A constant coefficient, with the methods of `AdaptiveKLController`."""

    def __init__(self, init_kl_coef: float):
        self.value = float(init_kl_coef)

    def update(self, kl: float, num_samples: int) -> float:
        """Returns `value`, unchanged."""
        return self.value

    def state_dict(self) -> dict[str, float]:
        """Empty: a resumed run takes the coefficient from its configuration."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """See `state_dict`."""


class AdaptiveKLController:
    """Steers the coefficient beta (`value`) of the KL penalty towards a target KL (Ziegler et al.
    2019, arXiv:1909.08593, 2.2; there n / horizon is K_beta = 0.1). Every rank has one and updates
    it with equal numbers. `ValueError`: a value that is not above 0.

        e = clip(KL / target - 1, -0.2, 0.2),    beta <- beta * (1 + e * n / horizon)

    `target` is the KL per *sample*, summed over its tokens, in nats; `horizon` counts samples.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float):
        given = {"init_kl_coef": init_kl_coef, "target": target, "horizon": horizon}
        for name, value in given.items():
            if not value > 0:
                raise ValueError(f"{name}={value} of an adaptive KL controller must be above 0")
        self.value = float(init_kl_coef)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, kl: float, num_samples: int) -> float:
        """Adapt to the `kl` of a rollout (means and numbers over all ranks); returns the new
        `value`. `ValueError`: `kl` is not finite, or beta could turn negative.
        """
        if not math.isfinite(kl):
            raise ValueError(f"the KL to the reference is {kl}: its coefficient cannot be adapted")
        if not _MAX_RELATIVE_ERROR * num_samples < self.horizon:
            raise ValueError(
                f"horizon={self.horizon:g} is too short for rollouts of {num_samples} samples: "
                "the KL coefficient could turn negative; it must be above "
                f"{_MAX_RELATIVE_ERROR * num_samples:g}"
            )
        error = min(max(kl / self.target - 1.0, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
        self.value *= 1.0 + error * num_samples / self.horizon
        return self.value

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold; target and horizon come from the configuration."""
        return {"kl_coef": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the coefficient of `state_dict()`; an empty state leaves it unchanged."""
        self.value = float(state.get("kl_coef", self.value))


# --------------------------------------------------------------------- losses by importance ratios
# With rho = exp(logprobs - prev_logprobs) of a token, A its advantage, and the range from 1 - low
# to 1 + high, each surrogate returns the loss of each token, float32 [B, S-1], and where the range
# removes its gradient, bool [B, S-1]; of whole samples.

LARGEST = 80.0  # exponent: beyond it a float32 overflows, and 0 * inf would be a NaN gradient
SAPO_RISING, SAPO_FALLING = 1.0, 1.05  # temperatures where A > 0, and else


class Tokens(NamedTuple):
    """What the losses read; tensors are float32 [B, S-1]."""

    logprobs: Tensor
    prev_logprobs: Tensor
    advantages: Tensor
    mask: Tensor  # 1 where a token counts
    low: float
    high: float

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.prev_logprobs

    @property
    def rho(self) -> Tensor:
        return bounded_exp(self.log_ratio)


def clipped_surrogate(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """max(-A rho, -A clip(rho)): Schulman et al. 2017, arXiv:1707.06347, eq. 7; with another high
    than low Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 10.
    """
    return _clipped(tokens.rho, tokens)


def gspo_surrogate(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The clipped surrogate by the ratio of the whole response, s = exp(mean of log rho): Zheng et
    al. 2025 (GSPO), arXiv:2507.18071, in the form of GSPO-token (eq. 13, 14), sg[s] rho / sg[rho].
    Where the tokens of a response share one advantage it is GSPO (eq. 5), in value and gradient.
    """
    whole = _mean(tokens.log_ratio.detach(), tokens.mask)
    moved = tokens.logprobs - tokens.logprobs.detach()  # 0, but for its gradient
    return _clipped(bounded_exp(whole + moved), tokens)


def cispo_surrogate(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """-sg[clip(rho)] A logprobs: MiniMax 2025, arXiv:2506.13585, eq. 4 and 5. Cuts no gradient."""
    weights = tokens.rho.detach().clamp(1.0 - tokens.low, 1.0 + tokens.high)
    return -weights * tokens.advantages * tokens.logprobs, _nowhere(tokens)


def sapo_surrogate(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """-A (4 / tau) sigmoid(tau (rho - 1)): Gao et al. 2025 (SAPO), arXiv:2511.20347. A gate that
    fades takes the place of the range, which is not read.
    """
    tau = torch.where(tokens.advantages > 0, SAPO_RISING, SAPO_FALLING)
    gate = torch.sigmoid(tau * (tokens.rho - 1)) * 4 / tau
    return -tokens.advantages * gate, _nowhere(tokens)


def gmpo_surrogate(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """-A exp(mean of log rho), each log rho clipped on the side that A pushes to, to at most high
    or at least -low: Zhao et al. 2025 (GMPO), arXiv:2507.20673. The range is one of logarithms,
    and A is that of the whole response: single tokens get no advantage of their own.
    """
    log_ratio, rises, falls = tokens.log_ratio, tokens.advantages > 0, tokens.advantages < 0
    cut = (rises & (log_ratio > tokens.high)) | (falls & (log_ratio < -tokens.low))
    bounded = torch.where(
        rises, log_ratio.clamp(max=tokens.high), log_ratio.clamp(min=-tokens.low)
    )
    return -tokens.advantages * bounded_exp(_mean(bounded, tokens.mask)), cut


# By the names of `core/estimators.py:POLICY_LOSSES`.
SURROGATES: dict[str, Callable[[Tokens], tuple[Tensor, Tensor]]] = {
    "clip": clipped_surrogate,
    "gspo": gspo_surrogate,
    "cispo": cispo_surrogate,
    "sapo": sapo_surrogate,
    "gmpo": gmpo_surrogate,
}


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, finite for any ratio."""
    return log_ratio.clamp(max=LARGEST).exp()


def _clipped(ratios: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    unclipped = -tokens.advantages * ratios
    clipped = -tokens.advantages * ratios.clamp(1.0 - tokens.low, 1.0 + tokens.high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def _nowhere(tokens: Tokens) -> Tensor:
    return torch.zeros_like(tokens.mask, dtype=torch.bool)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean [B, 1] of each row's values [B, S-1] that count; 0 where none does."""
    return (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


# ------------------------------------------------- an engine whose tokens have other probabilities


# A smaller difference of one token's log-probs is rounding of float32 and counts as none, so that
# a sampler that is the trainer's own model changes no bit.
ROUNDING = 1e-4


# Importance weights for samples of an engine that gives tokens other probabilities than the
# trainer does: truncated (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl), and left
# out beyond a range (Ling Team 2025, "IcePop", arXiv:2510.18855).


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
    log_ratio: Tensor,
    mask: Tensor,
    *,
    weights: str | None,
    cap: float,
    reject: str | None,
    low: float,
    high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the advantages are multiplied with, [B, S-1]: the importance weight of level `weights`,
    `cap` at most, or 0 where the ratio of level `reject` is not from `low` to `high`; None: off.
    And by name where it is so, for metrics: bool [B, S-1].
    """
    factors, where = torch.ones_like(log_ratio), {}
    if weights is not None:
        ratios = importance_ratios(log_ratio, mask, weights)
        factors, where["capped"] = ratios.clamp(max=cap), ratios > cap
    if reject is not None:
        ratios = importance_ratios(log_ratio, mask, reject)
        where["rejected"] = (ratios < low) | (ratios > high)
        factors = torch.where(where["rejected"], 0, factors)
    return factors, where


# ---------------------------------------------------- the few tokens that take most of the entropy
# Tokens whose log-prob and advantage vary together (Cui et al. 2025, arXiv:2505.22617), of the N
# samples of a whole rollout in an order that does not depend on the split: [N, S-1].


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(log pi - mean)(A - mean) of each token, float64; means over the mask."""
    logprobs, advantages = logprobs.double(), advantages.double()
    return (logprobs - masked_mean(logprobs, mask)) * (advantages - masked_mean(advantages, mask))


def chosen_tokens(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    response_tokens: Tensor,
    *,
    rule: str,
    fraction: float,
    low: float,
    high: float,
) -> Tensor:
    """bool [N, S-1]: a `fraction` of all tokens, one at least. With rule "clip" (Clip-Cov) drawn
    among those with a covariance from `low` to `high` (maybe fewer), with "kl" (KL-Cov) the
    largest. `logprobs` are of the policy that generated, `advantages` of the updates;
    `response_tokens` int64 [N, S] seed the draw.
    """
    covariance, able = covariances(logprobs, advantages, mask), mask != 0
    count = max(1, int(fraction * int(able.sum())))
    priority = covariance
    if rule == "clip":
        able = able & (covariance >= low) & (covariance <= high)
        slots = torch.arange(mask.numel(), device=mask.device).view_as(mask)
        seed = int(sample_seeds(0, 0, response_tokens.flatten()).sum())
        priority = sample_seeds(seed, 0, slots).double()
    ordered = torch.where(able, priority, -torch.inf).flatten()
    order = ordered.argsort(descending=True, stable=True)
    chosen = torch.zeros_like(able).flatten()
    chosen[order[:count]] = True
    return chosen.view_as(able) & able
