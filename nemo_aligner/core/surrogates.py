# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""What a policy's tokens lose by their importance ratios: PPO's clipped surrogate, and what others
put in its place. Pure functions, of whole samples.

With rho = exp(logprobs - prev_logprobs) of a token, A its advantage, and the range from 1 - low to
1 + high, each function returns the loss of each token, float32 [B, S-1], and where the range
removes its gradient, bool [B, S-1].
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

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
