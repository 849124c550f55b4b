# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which slots belong to the response, and statistics over exactly these slots. No ranks.

Shapes: `[B, S-1]` is per transition, column t predicts token t+1 (see `nemo_aligner.core.types`).
A mask is non-zero where a slot counts; elsewhere a tensor may hold anything, NaN included.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def create_mask(values: Tensor, prompt_lengths: Tensor, response_lengths: Tensor) -> Tensor:
    """Mask [B, S-1] of the response's transitions: 1 on columns [P-1, R-1), which is R-P ones;
    dtype and device of `values`. `prompt_lengths`, `response_lengths`: int [B], P and R (in all).
    """
    column = torch.arange(values.shape[1], device=values.device)
    start = prompt_lengths.to(values.device).reshape(-1, 1) - 1
    stop = response_lengths.to(values.device).reshape(-1, 1) - 1
    return ((column >= start) & (column < stop)).to(values.dtype)


def counted_lengths(weights: Tensor, width: int) -> Tensor:
    """How many tokens of each sample its counting slots depend on: int64 [B], from 1 (2 with S-1
    columns) to S (`width`); the least where no slot counts. `weights` are [B, S-1] or [B, S]
    (column t predicts its own label): a last counting column 2 of [B, S-1] means tokens 0 to 3.
    """
    column = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights != 0, column, 0).amax(1)
    return last + 1 + width - weights.shape[1]


def lengths_before(padding_id: int | None, tokens: Tensor, lengths: Tensor) -> Tensor:
    """`lengths` int64 [N] of `tokens` [N, S] without `padding_id` at the end; at least 1."""
    if padding_id is None:
        return lengths
    column = torch.arange(tokens.size(1), device=tokens.device)
    counts = (tokens != padding_id) & (column < lengths.to(tokens.device).reshape(-1, 1))
    return torch.where(counts, column, 0).amax(1) + 1


def one_row_per_sample(mask: Tensor, packed_position_ids: Tensor) -> Tensor:
    """Spread the samples of packed rows `mask` [B, S] over rows of their own, where their columns
    are: [B * K, S]; K is the most samples of a row. Sample k of row b is row b * K + k, and is 0
    outside its columns. `packed_position_ids` int [B, S]: 0 where a sample begins, so in column 0.
    """
    number = (packed_position_ids == 0).cumsum(1) - 1  # [B, S]: of the sample in its row
    count = int(number.max()) + 1
    rows = mask.new_zeros(mask.shape[0], count, mask.shape[1])
    rows.scatter_(1, number.unsqueeze(1), mask.unsqueeze(1))
    return rows.flatten(0, 1)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` (same shape) is non-zero, over all of it or along `dim`."""
    kept = torch.where(mask != 0, values, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean where `mask` (same shape) is non-zero, of all or along `dim`; 0 if no slot counts."""
    keep = mask != 0
    kept = torch.where(keep, values, 0)
    if dim is None:
        return kept.sum() / keep.sum().clamp(min=1)
    return kept.sum(dim) / keep.sum(dim).clamp(min=1)


def masked_std(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Standard deviation (Bessel-corrected) as `masked_mean`; 0 for fewer than two values."""
    keep = mask != 0
    if dim is None:
        return masked_std(values.flatten(), keep.flatten(), 0)
    deviation = values - masked_mean(values, keep, dim).unsqueeze(dim)
    squares = torch.where(keep, deviation, 0).square().sum(dim)
    return (squares / (keep.sum(dim) - 1).clamp(min=1)).sqrt()


def masked_mean_var(
    values: Tensor, mask: Tensor, sum_over_dp: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance (not Bessel-corrected) over the slots of all ranks where `mask` is
    non-zero: two float64 scalars; 0 if no slot counts anywhere. All ranks call it; `sum_over_dp`
    sums a float64 tensor over them.
    """
    keep = mask != 0
    kept = torch.where(keep, values.detach().double(), 0)
    total, count = sum_over_dp(torch.stack([kept.sum(), keep.sum(dtype=torch.float64)]))
    count = count.clamp(min=1)
    mean = total / count
    # A second pass over the deviations: E[x^2] - E[x]^2 would cancel.
    return mean, sum_over_dp(torch.where(keep, kept - mean, 0).square().sum()) / count


def whiten(
    values: Tensor,
    mask: Tensor,
    shift_mean: bool = True,
    sum_over_dp: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) with `masked_mean_var`, plus the mean again unless
    `shift_mean`; 0 outside the mask. All ranks call it.

    Token rewards keep their mean: a reward that moves with the others of its batch would no longer
    say what is good (TRL does the same, with the Bessel-corrected variance).
    """
    mean, var = masked_mean_var(values, mask, sum_over_dp)
    whitened = (values.double() - mean) * torch.rsqrt(var + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask != 0, whitened, 0).to(values.dtype)
