# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy from logits whose vocabulary is split over the tensor-parallel ranks.

Policy, reference and training all take their log-probs from here, so that they agree to the bit.
Arithmetic is fp32 (fp64 if the logits are), on a few tokens at a time: besides the logits the only
tensor of size [B, S, V] is their gradient, which may overwrite them (`overwrite_logits`).

Notation: V vocabulary with padding, split evenly in rank order; per token M = max x over the
vocabulary, s = (x - M) / temperature, Z = sum exp(s), p = exp(s) / Z. With them

    log p = s - log Z                   d log p[target] / dx = (onehot - p) / temperature
    H = log Z - m,  m = sum p s         dH / dx = -p (s - m) / temperature

With context parallelism the logits are those of this rank's share of the positions; targets and
results have the full width. W is the width that the model computed, S or a little more, so that it
can be split. Every rank of a tensor- and context-parallel group must make the same calls.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_aligner.core.tensors import masked_mean
from nemo_aligner.parallel import collectives, parallel_state

# Elements of one working buffer: 1 MiB of fp32 stays in a CPU's cache; a GPU wants long kernels.
CHUNK_ELEMENTS = 1 << 18
CHUNK_ELEMENTS_GPU = 1 << 24


def scaled_logits(logits: Tensor, config: Any) -> Tensor:
    """What a model makes of its output layer's logits: l / `logits_scaling`, then c tanh(l / c)
    with c = `final_logit_softcapping`.
    """
    if config.logits_scaling != 1:
        logits = logits / config.logits_scaling
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    inference_only: bool = False,
    higher_stability: bool = False,
    ignore_last: bool = True,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
) -> Tensor:
    """Log-prob float32 [B, S-1] of each target token, or [B, S] without `ignore_last`; -inf for a
    target outside the vocabulary.

    Args:
        vocab_parallel_logits: [B, W/CP, V/TP], this rank's slice and share.
        target: int64 [B, S]. With `ignore_last` the tokens: column t is scored on token t+1
            (shifted here), and the last column is dropped. Without it column t is scored on target
            t.
        inference_only: keep nothing for a backward pass.
        higher_stability: not used (NeMo-Aligner's signature).
        temperature: of sampling; the result is log softmax(logits / temperature).
        vocab_size: real tokens; the padding above gets no probability and no gradient. None: V.
        overwrite_logits: let the backward pass write the gradient over the logits, which must not
            be a leaf of the graph. Another backward pass that needs them then raises (autograd
            counts writes), but reading them directly does not.
    """
    how = inference_only, temperature, vocab_size, overwrite_logits
    return _scores_of_tokens(vocab_parallel_logits, target, ignore_last, *how)[0]


def logprobs_and_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    inference_only: bool = False,
    ignore_last: bool = True,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs and the entropy of the same distributions, both float32 [B, S-1], or [B, S]
    without `ignore_last`. Arguments and log-probs, to the bit, are those of
    `from_parallel_logits_to_logprobs`. `entropy.detach()` spares the backward pass its part. The
    logits must be finite.
    """
    how = inference_only, temperature, vocab_size, overwrite_logits
    logprobs, entropy = _scores_of_tokens(
        vocab_parallel_logits, target, ignore_last, *how, with_entropy=True
    )
    assert entropy is not None
    return logprobs, entropy


def calculate_distributed_entropy(
    vocab_parallel_logits: Tensor,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """Mean of the entropy of `logprobs_and_entropy`, over the slots of `mask` [B, S-1], else over
    all but the last of W, by NeMo-Aligner's name.
    """
    samples, width, _ = vocab_parallel_logits.shape
    whole = width * parallel_state.get_context_parallel_world_size()
    # Any token serves as the target: its log-prob is not used.
    columns = whole if mask is None else mask.shape[1] + 1
    target = torch.zeros(samples, columns, dtype=torch.int64, device=vocab_parallel_logits.device)
    entropy = logprobs_and_entropy(
        vocab_parallel_logits, target, temperature=temperature, vocab_size=vocab_size
    )[1]
    return entropy.mean() if mask is None else masked_mean(entropy, mask)


class DistributedLogprob:
    """Log-probs of aligned targets, with the name and call of NeMo-Aligner's autograd function."""

    apply = staticmethod(partial(from_parallel_logits_to_logprobs, ignore_last=False))


def _scores_of_tokens(
    logits: Tensor, target: Tensor, ignore_last: bool, *how: Any, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    if ignore_last:
        target = target.roll(shifts=-1, dims=-1)
    wanted = target.shape[1] - int(ignore_last)
    scores, entropy = _scores(logits, target.unsqueeze(-1), wanted, 0, with_entropy, *how)
    return scores.squeeze(-1), entropy


def _scores(
    logits: Tensor,
    candidates: Tensor,
    wanted: int,
    rest_of: int,
    with_entropy: bool,
    inference_only: bool,
    temperature: float,
    vocab_size: int | None,
    overwrite_logits: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `candidates` [B, S, C] in the first `wanted` columns; the entropy or None."""
    if overwrite_logits and logits.requires_grad and logits.is_leaf:
        raise ValueError(
            "overwrite_logits=True on a leaf of the graph would make its values and its gradient "
            "share memory"
        )
    given = candidates.shape[1]
    shard = VocabShard(logits, given, wanted, temperature, vocab_size)
    candidates = torch.nn.functional.pad(candidates, (0, 0, 0, shard.whole_width - given))
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        scores, entropy = _Scores.apply(
            logits,
            collectives.take_share(candidates, 1),
            shard,
            rest_of,
            with_entropy,
            overwrite_logits,
        )
        scores = collectives.gather_shares(scores, 1)[:, :wanted]
        if entropy is not None:
            entropy = collectives.gather_shares(entropy, 1)[:, :wanted]
        return scores, entropy


class _Scores(torch.autograd.Function):
    """The formulas of this module, for the first columns of the logits; the others give 0."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        candidates: Tensor,
        shard: "VocabShard",
        rest_of: int,
        with_entropy: bool,
        overwrite_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        local_max = shard.per_token(torch.finfo(shard.dtype).min)
        chosen = shard.per_token(-torch.inf, candidates.shape[-1])
        local_sum = shard.per_token(0.0)
        second = shard.per_token(0.0)  # the sum for the entropy, or that of the rest
        for block in shard.blocks():
            x = logits[block][..., : shard.width]
            local_max[block] = x.amax(-1)
            index, here = shard.places(candidates[block])
            chosen[block] = torch.where(here, x.gather(-1, index).to(shard.dtype), -torch.inf)
            s = shard.shifted(x, local_max[block])
            exp = s.exp() if with_entropy else s.exp_()
            local_sum[block] = exp.sum(-1)
            if with_entropy:
                second[block] = exp.mul_(s).sum(-1)
            elif rest_of:
                second[block] = _without(exp, index, here, rest_of).sum(-1)
        largest = shard.all_reduce(
            torch.cat([local_max.unsqueeze(-1), chosen], -1), dist.ReduceOp.MAX
        )
        maximum, chosen = largest[..., 0], largest[..., 1:]
        # From the local maximum to the common one. A slice of padding only has sums of 0.
        shift = torch.where(local_sum > 0, (local_max - maximum) / shard.temperature, 0.0)
        sums = [local_sum]
        if with_entropy:
            sums.append(second + shift * local_sum)
        elif rest_of:
            sums.append(second)
        total, *others = shard.all_reduce(torch.stack(sums) * shift.exp(), dist.ReduceOp.SUM)
        log_total = total.log()
        scores = (chosen - maximum.unsqueeze(-1)) / shard.temperature - log_total.unsqueeze(-1)
        if rest_of:
            scores = torch.cat([scores, (others[0].log() - log_total).unsqueeze(-1)], -1)
        mean = others[0] / total if with_entropy else None
        ctx.set_materialize_grads(False)  # the gradient of what is not used is None, not zeros
        ctx.save_for_backward(logits, candidates, maximum, total, mean, *others)
        ctx.shard, ctx.rest_of, ctx.overwrite_logits = shard, rest_of, overwrite_logits
        return shard.padded(scores), shard.padded(log_total - mean) if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_scores: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None, None]:
        logits, candidates, maximum, total, mean, *others = ctx.saved_tensors
        shard, rest_of, count = ctx.shard, ctx.rest_of, candidates.shape[-1]
        # `detach` shares the count of writes, so another node that saved the logits raises.
        grad = logits.detach() if ctx.overwrite_logits else torch.empty_like(logits)
        grad[:, shard.columns :].zero_()  # nothing is computed there, nor of padding
        grad[..., shard.width :].zero_()
        if grad_scores is None:
            grad_scores = shard.per_token(0.0, count + bool(rest_of))
        else:
            grad_scores = grad_scores[:, : shard.columns]
        unused = (grad_scores == 0).all(-1)
        # The gradient is exp(s) (slope s + offset), plus that of the chosen logits.
        scale = -1.0 / (total * shard.temperature)
        slope, offset = None, scale * grad_scores[..., 0]
        grad_scores = grad_scores / shard.temperature
        if grad_scores.shape[-1] > 1:
            offset = -grad_scores.sum(-1) / total
        if grad_entropy is not None:
            grad_entropy = grad_entropy[:, : shard.columns]
            unused &= grad_entropy == 0
            slope, offset = scale * grad_entropy, offset - scale * grad_entropy * mean
        if rest_of:  # a rest without a token has no gradient
            rest_slope = torch.where(others[0] > 0, grad_scores[..., count] / others[0], 0.0)
        for block in shard.blocks():
            s = shard.shifted(logits[block][..., : shard.width], maximum[block])
            index, here = shard.places(candidates[block])
            at_offset = offset[block].unsqueeze(-1)
            if slope is not None:
                exp = s.exp()
                result = s.mul_(slope[block].unsqueeze(-1)).add_(at_offset).mul_(exp)
            elif rest_of:
                result = s.exp_() * at_offset
                outside = _without(s, index, here, rest_of)
                result.addcmul_(outside, rest_slope[block].unsqueeze(-1))
            else:
                result = s.exp_().mul_(at_offset)
            at_chosen = torch.where(here, grad_scores[block][..., :count], 0.0)
            result.scatter_add_(-1, index, at_chosen)
            # Selected, not multiplied: what is not used may be NaN, and 0 * NaN is NaN.
            result.masked_fill_(unused[block].unsqueeze(-1), 0.0)
            grad[block][..., : shard.width].copy_(result)
        return grad, None, None, None, None, None


class VocabShard:
    """The part of its logits [B, W/CP, V/TP] that a rank computes for the first `wanted`
    positions, in blocks: the first `columns` columns and the real tokens. `first` is the token id
    of its first column, `width` the number of its real tokens (0 if it holds padding only),
    `whole_width` W, `dtype` that of the arithmetic. `ValueError`: more targets (`given`) than W.
    """

    def __init__(
        self,
        logits: Tensor,
        given: int,
        wanted: int,
        temperature: float,
        vocab_size: int | None,
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be above 0 (greedy decoding: 1)")
        self.temperature = temperature
        self.dtype = torch.promote_types(logits.dtype, torch.float32)
        self._rows, self._all_columns, width = logits.shape
        self._device = logits.device
        whole = self._all_columns * parallel_state.get_context_parallel_world_size()
        if given > whole:
            raise ValueError(f"targets of width {given} for logits of {whole} positions")
        # Positions ascend within a share, so the wanted ones come first.
        self.columns = int((collectives.share_positions(whole) < wanted).sum())
        self.whole_width = whole
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._several_ranks = parallel_state.get_tensor_model_parallel_world_size() > 1
        self.first = parallel_state.get_tensor_model_parallel_rank() * width
        self.width = width if vocab_size is None else min(max(vocab_size - self.first, 0), width)

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Indices (rows, columns) of blocks that fit the working buffer."""
        if not self.width:
            return
        elements = CHUNK_ELEMENTS_GPU if self._device.type == "cuda" else CHUNK_ELEMENTS
        tokens = max(1, elements // self.width)
        columns = max(1, min(self.columns, tokens))  # neighbours in memory
        rows = tokens // columns
        for row in range(0, self._rows, rows):
            for column in range(0, self.columns, columns):
                yield slice(row, row + rows), slice(column, min(column + columns, self.columns))

    def per_token(self, value: float, *each: int) -> Tensor:
        """[B, columns, *each] filled with `value`."""
        return torch.full(
            (self._rows, self.columns, *each), value, dtype=self.dtype, device=self._device
        )

    def padded(self, tensor: Tensor) -> Tensor:
        """[B, columns, ..] -> [B, W/CP, ..], filled with 0."""
        behind = (0, 0) * (tensor.dim() - 2)
        return torch.nn.functional.pad(tensor, (*behind, 0, self._all_columns - self.columns))

    def shifted(self, x: Tensor, maximum: Tensor) -> Tensor:
        """s = (x - maximum) / temperature in `dtype`, in new memory."""
        s = torch.sub(x, maximum.unsqueeze(-1))  # of the wider dtype, which is that of the maximum
        return s if self.temperature == 1.0 else s.div_(self.temperature)

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(column of each token id in this slice, 0 for others; whether it lies in it)."""
        index = ids - self.first
        here = (index >= 0) & (index < self.width)
        return torch.where(here, index, 0), here

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self._several_ranks:
            dist.all_reduce(tensor, op=op, group=self._group)
        return tensor

    def gathered(self, tensor: Tensor) -> Tensor:
        """[.., C] -> [.., TP * C]: the numbers of all slices, in rank order."""
        if not self._several_ranks:
            return tensor
        size = parallel_state.get_tensor_model_parallel_world_size()
        parts = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, -1)


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
    """Log-prob float32 [B, S, C] of each candidate under the softmax over the whole vocabulary, or
    with `rest_of` [B, S, C+1], the rest last. -inf: a candidate outside the vocabulary, and a rest
    without a token. With p = softmax(logits / temperature) and candidates c_1 to c_C of a position

        result_i = log p[c_i]       d result_i / d logits = (onehot(c_i) - p) / temperature

    and with `rest_of` = n also log r, r = the sum of p over all tokens but c_1 to c_n:

        d log r / d logits = (p / r outside c_1 to c_n, else 0, less p) / temperature

    `candidates` are int64 [B, S, C], S at most W; column t belongs to the logits of column t. The
    other arguments are those of `from_parallel_logits_to_logprobs`.
    """
    how = inference_only, temperature, vocab_size, overwrite_logits
    return _scores(vocab_parallel_logits, candidates, candidates.shape[1], rest_of, False, *how)[0]


@torch.no_grad()
def top_logits(
    vocab_parallel_logits: Tensor, top_k: int, wanted: int, vocab_size: int | None = None
) -> TopLogits:
    """The `top_k` (at most the vocabulary) largest logits of each of the first `wanted` positions,
    of all ranks' slices. Logits as for `from_parallel_logits_to_logprobs`.
    """
    shard = VocabShard(vocab_parallel_logits, wanted, wanted, 1.0, vocab_size)
    here = min(top_k, shard.width)
    values = shard.per_token(-torch.inf, top_k)
    ids = torch.zeros_like(values, dtype=torch.int64)
    local_sum = shard.per_token(0.0)
    for block in shard.blocks():
        x = vocab_parallel_logits[block][..., : shard.width]
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
    gather = collectives.gather_shares
    return TopLogits(*(gather(shard.padded(x), 1)[:, :wanted] for x in results))


def _without(exp: Tensor, index: Tensor, here: Tensor, count: int) -> Tensor:
    """`exp`, which is changed, with 0 in the columns of the first `count` candidates."""
    # The smaller of two values: an index that stands for a candidate of another slice keeps its.
    zeros = torch.where(here[..., :count], 0.0, torch.inf).to(exp.dtype)
    return exp.scatter_reduce_(-1, index[..., :count], zeros, "amin")
