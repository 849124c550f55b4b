# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Which slots belong to the response, statistics over exactly these slots, helpers over tensors
and dicts of them, by NeMo-Aligner's names, and samples' random streams. No ranks.

Shapes: `[B, S-1]` is per transition, column t predicts token t+1 (see `nemo_aligner.core.types`).
A mask is non-zero where a slot counts; elsewhere a tensor may hold anything, NaN included.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.core.errors import UserError


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
    return torch.where(mask != 0, values, 0).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean where `mask` (same shape) is non-zero, of all or along `dim`; 0 if no slot counts."""
    keep = mask != 0
    return torch.where(keep, values, 0).sum(dim) / keep.sum(dim).clamp(min=1)


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


def calculate_response_lengths(tokens: Tensor, eos_id: int) -> Tensor:
    """int64 [B]: how many of the tokens [B, S] are not `eos_id`, which pads them."""
    return (tokens != eos_id).sum(-1)


def select_log_probs(full_log_probs: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of each next token [B, S-1], and the distributions it is taken from [B, S-1, V], of
    `full_log_probs` [B, S, V]: column t over the token t+1 of `indices` int64 [B, S].
    """
    distributions = full_log_probs[:, :-1].contiguous()
    chosen = distributions.gather(-1, indices[:, 1:, None])
    return chosen.squeeze(-1), distributions


def batch_pad_to_fixed_len(
    batch: Sequence[Tensor], max_batch_len: int, pad_token: float
) -> Tensor:
    """[B, max_batch_len] from B tensors [n], padded by `pad_token`; `UserError`: too long."""
    longest = max(map(len, batch))
    if longest > max_batch_len:
        raise UserError(f"a sequence of {longest} does not fit into max_batch_len={max_batch_len}")
    pad = torch.nn.functional.pad
    return torch.stack([pad(x, (0, max_batch_len - len(x)), value=pad_token) for x in batch])


def get_iterator_k_split_list(batch: list[Any], num_microbatches: int) -> Iterator[list[Any]]:
    """`num_microbatches` equal parts of a list, in order; `UserError`: it cannot be divided so."""
    size, rest = divmod(len(batch), num_microbatches)
    if rest:
        raise UserError(f"a list of {len(batch)} has no {num_microbatches} equal parts")
    return iter([batch[start * size :][:size] for start in range(num_microbatches)])


def apply_func_to_dict(
    func: Callable[[Any], Any], dictionary: Mapping[str, Any]
) -> dict[str, Any]:
    """`dictionary` with `func` applied to its values."""
    return {key: func(value) for key, value in dictionary.items()}


def move_to_device_if_tensor(device: torch.device | str, item: Any) -> Any:
    """A tensor on `device`; anything else as it is."""
    return item.to(device) if torch.is_tensor(item) else item


def cpu_dict(dictionary: Mapping[str, Any]) -> dict[str, Any]:
    """`dictionary` with its tensors in host memory."""
    return apply_func_to_dict(lambda item: move_to_device_if_tensor("cpu", item), dictionary)


def append_and_repad_list(
    list_of_items: Sequence[int], item_to_append: int, pad_id: int
) -> list[int]:
    """The items but `pad_id`, then `item_to_append`, then `pad_id` up to one more than before."""
    items = [item for item in list_of_items if item != pad_id] + [item_to_append]
    return items + [pad_id] * (len(list_of_items) + 1 - len(items))


# --------------------------------------------------------------------------------- random streams


def sample_seeds(seed: int, step: int, idx: Tensor) -> Tensor:
    """A seed int64 [B], in [0, 2**63), for each sample's own random stream, from (seed of the run,
    step, `idx` int64 [B] in the data set) alone: not from the rank, batch or place of the sample.
    """
    state = torch.full_like(idx, seed, dtype=torch.int64)
    state = _splitmix64(_splitmix64(state) + step)
    return _splitmix64(state + idx) & 0x7FFFFFFFFFFFFFFF


def _splitmix64(x: Tensor) -> Tensor:
    """One output of SplitMix64 (Steele, Lea, Flood 2014) for each state; int64 wraps as uint64."""
    x = x - 0x61C8864680B583EB  # + 0x9E3779B97F4A7C15, as a signed number
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own `>>` copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
