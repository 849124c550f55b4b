# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""From logits to the next token: pure functions of plain tensors, without ranks or a model.

b samples, V ids without padding. A forbidden id has the logit -inf. A token is drawn by inverting
the cumulative distribution at a number of the sample's own stream: other samples have no effect.
"""

import torch
from torch import Tensor

from nemo_aligner.core.tensors import _splitmix64

_GOLDEN_GAMMA = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number: SplitMix64's step


def sample_uniforms(sample_seeds: Tensor, max_length: int) -> Tensor:
    """float64 `[b, max_length]` in [0, 1): a number per generated token, from SplitMix64 streams
    of `sample_seeds` int64 `[b]`. A longer stream starts like a shorter one.
    """
    steps = torch.arange(max_length, device=sample_seeds.device) * _GOLDEN_GAMMA
    bits = _splitmix64(_splitmix64(sample_seeds.long()).unsqueeze(1) + steps)
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53


def seen_tokens(tokens: Tensor, lengths: Tensor, vocab_size: int) -> Tensor:
    """bool `[b, vocab_size]`: the id is among the first `lengths` `[b]` of `tokens` `[b, W]`."""
    valid = torch.arange(tokens.size(1), device=tokens.device) < lengths.unsqueeze(1)
    seen = torch.zeros(tokens.size(0), vocab_size + 1, dtype=torch.bool, device=tokens.device)
    return seen.scatter_(1, torch.where(valid, tokens, vocab_size), True)[:, :vocab_size]


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Penalize the ids in `seen`, bool `[b, V]` (Keskar et al. 2019, CTRL, section 4.1)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def forbid_tokens(logits: Tensor, token_ids: Tensor, where: Tensor) -> Tensor:
    """Put -inf at `token_ids` `[n]` of `logits` `[b, V]` where `where`, bool `[b]`, is True."""
    columns = torch.zeros(logits.size(1), dtype=torch.bool, device=logits.device)
    columns.index_fill_(0, token_ids, True)  # an assignment would copy the number from the host
    return logits.masked_fill(where.unsqueeze(1) & columns, float("-inf"))


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Forbid all but the k likeliest ids of `logits` `[b, V]`; ids that tie with the k-th stay."""
    if top_k >= logits.size(1):
        return logits
    threshold = logits.topk(top_k, dim=1).values[:, -1:]
    return logits.masked_fill(logits < threshold, float("-inf"))


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the fewest likeliest ids whose probabilities reach `top_p` (Holtzman et al. 2020)."""
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=1).double()
    before = probabilities.cumsum(dim=1) - probabilities
    forbidden = torch.empty_like(order, dtype=torch.bool).scatter_(1, order, before >= top_p)
    return logits.masked_fill(forbidden, float("-inf"))


def invert_cdf(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Ids int64 `[b]` where the cumulative probability passes `uniforms`, float64 `[b]` in [0,
    1).
    """
    cumulative = logits.softmax(dim=1).cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Below the total even after rounding: an id of probability zero is never reached.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms.unsqueeze(1) * total, below)
    ids = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return ids.clamp(max=logits.size(1) - 1)


def choose_tokens(
    logits: Tensor,
    *,
    uniforms: Tensor | None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seen: Tensor | None = None,
    end_token_ids: Tensor | None = None,
    too_short: Tensor | None = None,
) -> Tensor:
    """The next token of each sample, int64 `[b]`; -1 for one whose logits are not finite. Order:
    repetition penalty, temperature, minimum length, top-k, top-p, then the draw.

    Args:
        logits: float32 `[b, V]`.
        uniforms: float64 `[b]` in [0, 1); None takes the likeliest id, whatever the other values.
        seen: bool `[b, V]`, True for ids that the sample has; needed with a repetition penalty.
        end_token_ids: int64 `[n]`, ids that samples with `too_short` must not take.
        too_short: bool `[b]`, True for responses below their minimum length; None for none.
    """
    if repetition_penalty != 1.0:
        if seen is None:
            raise ValueError("repetition_penalty needs `seen`, the ids that each sample has")
        logits = apply_repetition_penalty(logits, seen, repetition_penalty)
    if too_short is not None:
        if end_token_ids is None:
            raise ValueError("too_short needs end_token_ids")
        logits = forbid_tokens(logits, end_token_ids, too_short)
    finite = logits.amax(dim=1).isfinite()  # a NaN among logits is their maximum
    if uniforms is None:
        tokens = logits.argmax(dim=1)
    else:
        if temperature != 1.0:
            logits = logits / temperature
        if top_k > 0:
            logits = keep_top_k(logits, top_k)
        if top_p < 1.0:
            logits = keep_top_p(logits, top_p)
        tokens = invert_cdf(logits, uniforms)
    return torch.where(finite, tokens, -1)
