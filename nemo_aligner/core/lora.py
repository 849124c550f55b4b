# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of LoRA adapters (arXiv 2106.09685, eq. 3), and a checksum of their base.

An adapter of a weight W `[out, in]` has A `[dim, in]` and B `[out, dim]`; with it the weight is `W
+ alpha / dim * B A`. A fused weight holds several projections (queries, keys and values; gate and
up). Its adapter has one A for all of them, or a *block* of A for each.
"""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

CHECKED_ROWS = 16  # of each weight that the checksum reads
# Odd factors of the positions (Knuth's MMIX multiplier and two of splitmix64).
_LAYER, _ROW, _COLUMN = 6364136223846793005, -7046029254386353131, -4658895280553007687


def qkv_blocks(groups: int, queries_per_group: int, head_size: int) -> Tensor:
    """int64 `[rows]`: 0, 1, 2 (queries, keys, values) of a fused weight's rows, group by group."""
    group = torch.tensor([0] * queries_per_group + [1, 2]).repeat_interleave(head_size)
    return group.repeat(groups)


def gated_blocks(rows: int) -> Tensor:
    """int64 `[rows]`: 0 in the first half (gate projection), 1 in the second (up projection)."""
    return torch.arange(2).repeat_interleave(rows // 2)


def expand_blocks(b: Tensor, blocks: Tensor, count: int = -1) -> Tensor:
    """B `[rows, dim]`, of an adapter with a block of A for each projection, as `[rows, count *
    dim]`: zeros but in each row's block. `blocks` int64 `[rows]`: which one; `count` -1: all.
    """
    one_hot = F.one_hot(blocks, count).to(b)
    return (one_hot.unsqueeze(-1) * b.unsqueeze(1)).flatten(1)


def delta(a: Tensor, wide_b: Tensor, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """What merging adds to a weight, `[rows, columns]`: `scale` (alpha / dim) times `wide_b`
    `[rows, d]` and `a` `[d, columns]`.
    """
    return scale * (wide_b.to(dtype) @ a.to(dtype))


def checked_rows(rows: int) -> range:
    """The rows of a weight with `rows` rows that the checksum reads."""
    return range(0, rows, max(rows // CHECKED_ROWS, 1))


def base_checksum(key: str, values: Tensor, layer: int, row: int, column: int) -> int:
    """Checksum of a part of one row of the weight `key`, `values` `[columns]` from the global
    place `layer, row, column` on: those of all parts are added modulo 2**64.

    Each number counts as its bits in bfloat16 (the same for a float32 model), times an odd factor
    of its place, so that the sum does not depend on how the weight is split.
    """
    bits = values.detach().to("cpu", torch.bfloat16).view(torch.int16).to(torch.int64)
    columns = torch.arange(column, column + len(bits))
    name = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
    place = torch.tensor(layer) * _LAYER + torch.tensor(row) * _ROW + columns * _COLUMN + name
    return int((bits * (2 * place + 1)).sum())
