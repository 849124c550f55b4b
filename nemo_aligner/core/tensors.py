# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Helpers over tensors and dicts of them, by NeMo-Aligner's names, and samples' random streams."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.core.errors import UserError


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
