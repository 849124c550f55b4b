# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences split over the context-parallel ranks: split them, gather them, and their gradients.

The sequence is cut into 2*CP equal chunks; rank r holds chunks r and 2*CP-1-r, in this order: its
*share*, with cheap early and expensive late positions of a causal mask. Megatron Core
(`get_batch_on_this_cp_rank`) and Transformer Engine use and expect the same layout.

    S = 8, CP = 2: rank 0 holds positions 0 1 6 7, rank 1 holds 2 3 4 5

Everything here is the identity with one context-parallel rank. Otherwise all ranks of a
context-parallel group make the same calls, with equal shapes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_aligner.parallel import parallel_state


def width_multiple() -> int:
    """A width must be a multiple of this to be split: 2*CP, or 1 with one rank."""
    size = parallel_state.get_context_parallel_world_size()
    return 2 * size if size > 1 else 1


def take_share(x: Tensor, dim: int) -> Tensor:
    """This rank's part `[.., S/CP, ..]` of `x` along `dim`; `ValueError`: S is no multiple of
    2*CP.
    """
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return x
    if x.size(dim) % (2 * size):
        raise ValueError(
            f"a width of {x.size(dim)} is no multiple of {2 * size}, so it cannot be split over "
            f"{size} context-parallel ranks"
        )
    rank = parallel_state.get_context_parallel_rank()
    return _share(x.chunk(2 * size, dim), rank, dim)


def _share(chunks: Sequence[Tensor], rank: int, dim: int) -> Tensor:
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim)


def gather_shares(x: Tensor, dim: int, sum_gradients: bool = False) -> Tensor:
    """Join the shares `[.., S/CP, ..]` of all ranks, of a dtype that the backend carries (not
    bool), to `[.., S, ..]` on every rank. `sum_gradients` False: every rank computes the *same*
    loss from the result, so its part of the gradient is complete. True: they compute different
    things, so the backward pass sums the gradients over the ranks, a collective.
    """
    if parallel_state.get_context_parallel_world_size() == 1:
        return x
    return _GatherShares.apply(x, dim, sum_gradients)


def share_positions(width: int, device: torch.device | None = None) -> Tensor:
    """int64 `[width / CP]`: the positions of this rank's share of a sequence of `width`."""
    return take_share(torch.arange(width, device=device), 0)


class _GatherShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sum_gradients: bool) -> Tensor:
        ctx.dim, ctx.sum_gradients = dim, sum_gradients
        x = x.contiguous()
        size = parallel_state.get_context_parallel_world_size()
        shares = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(shares, x, group=parallel_state.get_context_parallel_group())
        early, late = zip(*(share.chunk(2, dim) for share in shares), strict=True)
        return torch.cat([*early, *reversed(late)], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.sum_gradients:
            return take_share(grad_output, ctx.dim), None, None
        size = parallel_state.get_context_parallel_world_size()
        chunks = grad_output.chunk(2 * size, ctx.dim)
        shares = [_share(chunks, rank, ctx.dim) for rank in range(size)]
        mine = torch.empty_like(shares[0])
        dist.reduce_scatter(mine, shares, group=parallel_state.get_context_parallel_group())
        return mine, None, None
