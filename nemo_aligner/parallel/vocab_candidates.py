# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Several candidates of the vocabulary at each position, from logits whose vocabulary is split
over the tensor-parallel ranks: the log-probs of given candidates, and the largest logits.

Notation and layout are those of `vocab_parallel.py`: fp32 arithmetic on a few tokens at a time,
padding of the vocabulary without probability, context-parallel ranks with their share of the
positions. Ranks exchange numbers of the candidates, never the vocabulary. Every rank of a tensor-
and context-parallel group must make the same calls.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_aligner.parallel import context_parallel, parallel_state
from nemo_aligner.parallel.vocab_parallel import VocabShard


class TopLogits(NamedTuple):
    """The largest logits of each position, in descending order."""

    logits: Tensor  # float32 [B, S, K], less the largest, so that the first is 0
    token_ids: Tensor  # int64 [B, S, K]
    log_sum_exp: Tensor  # float32 [B, S], of all logits less the largest


def candidate_logprobs(
    vocab_parallel_logits: Tensor,
    candidates: Tensor,
    *,
    rest_of: int = 0,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    inference_only: bool = False,
    overwrite_logits: bool = False,
) -> Tensor:
    """Log-prob of each candidate under the softmax over the whole vocabulary.

    With p = softmax(logits / temperature) and candidates c_1 to c_C of a position

        result_i = log p[c_i]       d result_i / d logits = (onehot(c_i) - p) / temperature

    and with `rest_of` = n also log r, r = the sum of p over all tokens but c_1 to c_n:

        d log r / d logits = (p / r outside c_1 to c_n, else 0, less p) / temperature

    Args:
        vocab_parallel_logits: [B, W/CP, V/TP], this rank's slice and share.
        candidates: int64 [B, S, C], S at most W; column t belongs to the logits of column t.
        rest_of: n; 0: without the rest.
        temperature, vocab_size, inference_only, overwrite_logits: as for
            `vocab_parallel.from_parallel_logits_to_logprobs`.

    Returns:
        float32 [B, S, C], or with `rest_of` [B, S, C+1], the rest last. A candidate outside the
        vocabulary, and a rest without a token, give -inf.
    """
    wanted = candidates.shape[1]
    shard = _shard(vocab_parallel_logits, wanted, temperature, vocab_size)
    width = vocab_parallel_logits.shape[1] * parallel_state.get_context_parallel_world_size()
    padded = torch.nn.functional.pad(candidates, (0, 0, 0, width - wanted))
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        logprobs: Tensor = _CandidateLogprobs.apply(
            vocab_parallel_logits,
            context_parallel.take_share(padded, 1),
            shard,
            rest_of,
            overwrite_logits,
        )
        return context_parallel.gather_shares(logprobs, 1)[:, :wanted]


@torch.no_grad()
def top_logits(
    vocab_parallel_logits: Tensor, top_k: int, wanted: int, vocab_size: int | None = None
) -> TopLogits:
    """The `top_k` largest logits of each position. Each rank finds those of its slice, and the
    largest of all of these are the result.

    Args:
        vocab_parallel_logits: [B, W/CP, V/TP], this rank's slice and share.
        top_k: K, at most the size of the vocabulary.
        vocab_size: number of real tokens; None: all of V is real.
    """
    shard = _shard(vocab_parallel_logits, wanted, 1.0, vocab_size)
    here = min(top_k, shard.width)
    values = shard.per_token(-torch.inf, top_k)
    ids = torch.zeros_like(values, dtype=torch.int64)
    local_sum = shard.per_token(0.0)
    for block in shard.blocks():
        x = shard.real(vocab_parallel_logits[block])
        largest, index = x.topk(here)
        values[block][..., :here] = largest
        ids[block][..., :here] = index + shard.first
        # The maximum in fp32, not in the logits' own precision.
        local_sum[block] = shard.shifted(x, values[block][..., 0]).exp_().sum(-1)
    local_max = values[..., 0].clamp(min=torch.finfo(shard.dtype).min)
    values, ids = shard.gathered(values), shard.gathered(ids)
    values, order = values.topk(top_k)
    maximum = values[..., :1]
    share = torch.where(local_sum > 0, (local_max - maximum[..., 0]).exp() * local_sum, 0.0)
    total = shard.all_reduce(share, dist.ReduceOp.SUM)
    results = (values - maximum, ids.gather(-1, order), total.log())
    return TopLogits(
        *(context_parallel.gather_shares(shard.padded(x), 1)[:, :wanted] for x in results)
    )


def _shard(logits: Tensor, wanted: int, temperature: float, vocab_size: int | None) -> VocabShard:
    """What of the logits is computed for the first `wanted` positions."""
    width = logits.shape[1] * parallel_state.get_context_parallel_world_size()
    if wanted > width:
        raise ValueError(f"candidates of width {wanted} for logits of {width} positions")
    columns = int((context_parallel.share_positions(width) < wanted).sum())
    return VocabShard(logits, temperature, vocab_size, columns)


class _CandidateLogprobs(torch.autograd.Function):
    """The formulas of `candidate_logprobs`, for the first columns of logits; others give 0."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        candidates: Tensor,
        shard: VocabShard,
        rest_of: int,
        overwrite_logits: bool,
    ) -> Tensor:
        count = candidates.shape[-1]
        local_max = shard.per_token(torch.finfo(shard.dtype).min)
        chosen = shard.per_token(-torch.inf, count)
        local_sums = shard.per_token(0.0, 2 if rest_of else 1)
        for block in shard.blocks():
            x = shard.real(logits[block])
            local_max[block] = x.amax(-1)
            index, here = shard.places(candidates[block])
            chosen[block] = torch.where(here, x.gather(-1, index).to(shard.dtype), -torch.inf)
            exp = shard.shifted(x, local_max[block]).exp_()
            local_sums[block][..., 0] = exp.sum(-1)
            if rest_of:
                local_sums[block][..., 1] = _without(exp, index, here, rest_of).sum(-1)
        largest = shard.all_reduce(
            torch.cat([local_max.unsqueeze(-1), chosen], -1), dist.ReduceOp.MAX
        )
        maximum, chosen = largest[..., 0], largest[..., 1:]
        # From the local maximum to the common one; a slice of padding only has none.
        shift = (local_max - maximum) / shard.temperature
        shift = torch.where(local_sums[..., 0] > 0, shift, 0.0).exp()
        sums = shard.all_reduce(local_sums * shift.unsqueeze(-1), dist.ReduceOp.SUM)
        log_total = sums[..., :1].log()
        logprobs = (chosen - maximum.unsqueeze(-1)) / shard.temperature - log_total
        if rest_of:
            logprobs = torch.cat([logprobs, sums[..., 1:].log() - log_total], -1)
        ctx.save_for_backward(logits, candidates, maximum, sums)
        ctx.shard, ctx.rest_of, ctx.overwrite_logits = shard, rest_of, overwrite_logits
        return shard.padded(logprobs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, candidates, maximum, sums = ctx.saved_tensors
        shard, rest_of = ctx.shard, ctx.rest_of
        # `detach` shares the count of writes, so another node that saved the logits raises.
        grad = logits.detach() if ctx.overwrite_logits else torch.empty_like(logits)
        shard.clear_unreal(grad)
        gradient = shard.cropped(gradient) / shard.temperature
        unused = (gradient == 0).all(-1)
        slope = -gradient.sum(-1) / sums[..., 0]
        count = candidates.shape[-1]
        rest_slope = shard.per_token(0.0)
        if rest_of:  # a rest without a token has no gradient
            rest = sums[..., 1]
            rest_slope = torch.where(rest > 0, gradient[..., count] / rest, 0.0)
        for block in shard.blocks():
            exp = shard.shifted(shard.real(logits[block]), maximum[block]).exp_()
            index, here = shard.places(candidates[block])
            result = exp * slope[block].unsqueeze(-1)
            if rest_of:
                outside = _without(exp, index, here, rest_of)
                result.addcmul_(outside, rest_slope[block].unsqueeze(-1))
            result.scatter_add_(-1, index, torch.where(here, gradient[block][..., :count], 0.0))
            # Selected, not multiplied: what is not used may be NaN, and 0 * NaN is NaN.
            result.masked_fill_(unused[block].unsqueeze(-1), 0.0)
            shard.real(grad[block]).copy_(result)
        return grad, None, None, None, None


def _without(exp: Tensor, index: Tensor, here: Tensor, count: int) -> Tensor:
    """`exp`, which is changed, with 0 in the columns of the first `count` candidates."""
    # The smaller of two values: an index that stands for a candidate of another slice keeps its.
    zeros = torch.where(here[..., :count], 0.0, torch.inf).to(exp.dtype)
    return exp.scatter_reduce_(-1, index[..., :count], zeros, "amin")
