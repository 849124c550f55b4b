# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy from logits whose vocabulary is split over the tensor-parallel ranks.

The one source of log-probs for policy, reference and training, so that they agree to the bit. All arithmetic is fp32
(fp64 if the logits are), done on a few tokens at a time: beside the logits, and in training their gradient in their
own dtype, nothing of size [B, S, V] exists. Ranks exchange three numbers per token, never the vocabulary.

Notation: V vocabulary with padding, split evenly in rank order; x = logits / temperature; M and Z are the maximum of x
and the sum of exp(x - M) over the vocabulary. Every rank of a tensor-parallel group must make the same calls.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_aligner.utils import parallel_state
from nemo_aligner.utils.ppo_utils import masked_mean

CHUNK_ELEMENTS = 1 << 24  # of one working buffer: 64 MiB in fp32


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    inference_only: bool = False,
    higher_stability: bool = False,
    ignore_last: bool = True,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> Tensor:
    """Log-prob of each target token.

    Args:
        vocab_parallel_logits: [B, S, V/TP], this rank's slice.
        target: int64 [B, S]. With `ignore_last` the tokens themselves: column t is scored on token t+1 (shifted here).
            Without it they are aligned: column t is scored on target t.
        inference_only: keep nothing for a backward pass.
        higher_stability: accepted for NeMo-Aligner's callers; the stable form is always used.
        ignore_last: drop the last column, which predicts nothing.
        temperature: of the sampling: the result is log softmax(logits / temperature).
        vocab_size: number of real tokens; the padding above it gets no probability. None: all of V is real.

    Returns:
        float32 [B, S-1], or [B, S] without `ignore_last`. A target outside the vocabulary gives -inf.
    """
    if ignore_last:
        target = target.roll(shifts=-1, dims=-1)
    logprobs = DistributedLogprob.apply(
        vocab_parallel_logits, target, inference_only, higher_stability, temperature, vocab_size, ignore_last
    )
    return logprobs[:, :-1] if ignore_last else logprobs


def calculate_distributed_entropy(
    logits: Tensor, mask: Tensor | None = None, temperature: float = 1.0, vocab_size: int | None = None
) -> Tensor:
    """Entropy of the next-token distribution, differentiable.

    Args:
        logits: [B, S, V/TP], this rank's slice; finite.
        mask: [B, S-1]; if given, the result is the masked mean.
        temperature, vocab_size: as in `from_parallel_logits_to_logprobs`.

    Returns:
        float32 [B, S-1], the last column dropped; or a scalar with `mask`.
    """
    entropy = _DistributedEntropy.apply(logits, temperature, vocab_size)[:, :-1]
    return entropy if mask is None else masked_mean(entropy, mask)


class DistributedLogprob(torch.autograd.Function):
    """log softmax(x)[target] = x[target] - M - log Z; its gradient is (onehot - softmax(x)) / temperature."""

    @staticmethod
    def forward(
        ctx,
        vocab_parallel_logits,
        target,
        inference_only=False,
        higher_stability=False,
        temperature=1.0,
        vocab_size=None,
        ignore_last=False,
    ):
        """[B, S] log-probs of aligned targets; the last column is 0, and free, with `ignore_last`."""
        logits = vocab_parallel_logits
        shard = _Shard(logits, temperature, vocab_size)
        columns = target.shape[1] - int(ignore_last)
        local_max = shard.full_of_tokens(columns, torch.finfo(shard.dtype).min)
        local_sum = shard.full_of_tokens(columns, 0.0)
        chosen = shard.full_of_tokens(columns, -torch.inf)
        for span in shard.spans(columns):
            x = shard.scaled(logits, span)
            if x.shape[-1]:
                index, here = shard.local_index(target[:, span])
                chosen[:, span] = torch.where(here, x.gather(-1, index).squeeze(-1), -torch.inf)
                local_max[:, span] = x.amax(-1)
                local_sum[:, span] = x.sub_(local_max[:, span].unsqueeze(-1)).exp_().sum(-1)
        maximum, chosen = shard.all_reduce(torch.stack([local_max, chosen]), dist.ReduceOp.MAX)
        log_sum = shard.all_reduce(local_sum * (local_max - maximum).exp(), dist.ReduceOp.SUM).log()
        if not inference_only:
            ctx.save_for_backward(logits, target, maximum, log_sum)
            ctx.shard, ctx.columns = shard, columns
        return torch.nn.functional.pad(chosen - maximum - log_sum, (0, target.shape[1] - columns))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        logits, target, maximum, log_sum = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for span in ctx.shard.spans(ctx.columns):
            grad_token = grad_output[:, span].unsqueeze(-1)
            x = ctx.shard.scaled(logits, span)
            if x.shape[-1]:
                x = (
                    x.sub_(maximum[:, span].unsqueeze(-1))
                    .sub_(log_sum[:, span].unsqueeze(-1))
                    .exp_()
                    .mul_(-grad_token)
                )
                index, here = ctx.shard.local_index(target[:, span])
                x.scatter_add_(-1, index, grad_token * here.unsqueeze(-1))
                grad[:, span, : x.shape[-1]] = x.div_(ctx.shard.temperature)
        return grad, None, None, None, None, None, None


class _DistributedEntropy(torch.autograd.Function):
    """H = M + log Z - sum p x = log Z - U / Z with U = sum exp(x - M) (x - M); dH/dx = -p (log p + H)."""

    @staticmethod
    def forward(ctx, logits, temperature, vocab_size):
        shard = _Shard(logits, temperature, vocab_size)
        columns = logits.shape[1] - 1
        local_max = shard.full_of_tokens(columns, torch.finfo(shard.dtype).min)
        local_sum, local_u = shard.full_of_tokens(columns, 0.0), shard.full_of_tokens(columns, 0.0)
        for span in shard.spans(columns):
            x = shard.scaled(logits, span)
            if x.shape[-1]:
                local_max[:, span] = x.amax(-1)
                x.sub_(local_max[:, span].unsqueeze(-1))
                exp = x.exp()
                local_sum[:, span] = exp.sum(-1)
                local_u[:, span] = exp.mul_(x).sum(-1)
        maximum = shard.all_reduce(local_max.clone(), dist.ReduceOp.MAX)
        # Shift the sums from the local maximum to the common one.
        shift = local_max - maximum
        total, u = shard.all_reduce(
            torch.stack([local_sum, local_u + shift * local_sum]) * shift.exp(), dist.ReduceOp.SUM
        )
        log_sum = total.log()
        entropy = log_sum - u / total
        ctx.save_for_backward(logits, maximum, log_sum, entropy)
        ctx.shard, ctx.columns = shard, columns
        return torch.nn.functional.pad(entropy, (0, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        logits, maximum, log_sum, entropy = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for span in ctx.shard.spans(ctx.columns):
            log_p = ctx.shard.scaled(logits, span)
            if log_p.shape[-1]:
                log_p.sub_(maximum[:, span].unsqueeze(-1)).sub_(log_sum[:, span].unsqueeze(-1))
                scale = (-grad_output[:, span] / ctx.shard.temperature).unsqueeze(-1)
                p = log_p.exp()
                grad[:, span, : p.shape[-1]] = log_p.add_(entropy[:, span].unsqueeze(-1)).mul_(p).mul_(scale)
        return grad, None, None


class _Shard:
    """This rank's slice of the logits, served in chunks of columns (of all rows) as scaled copies in `dtype`."""

    def __init__(self, logits: Tensor, temperature: float, vocab_size: int | None):
        if not temperature > 0:
            raise ValueError(
                f"temperature={temperature} must be above 0 to score tokens (greedy decoding scores with 1)"
            )
        self._rows, self._device = logits.shape[0], logits.device
        self.temperature = temperature
        self.dtype = torch.promote_types(logits.dtype, torch.float32)
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._several_ranks = parallel_state.get_tensor_model_parallel_world_size() > 1
        width = logits.shape[-1]
        self._start = parallel_state.get_tensor_model_parallel_rank() * width
        # Real tokens in this slice; the last slices may hold padding only.
        self._width = width if vocab_size is None else min(max(vocab_size - self._start, 0), width)
        self._chunk = max(1, CHUNK_ELEMENTS // max(1, self._rows * width))

    def full_of_tokens(self, columns: int, value: float) -> Tensor:
        return torch.full((self._rows, columns), value, dtype=self.dtype, device=self._device)

    def spans(self, columns: int):
        for start in range(0, columns, self._chunk):
            yield slice(start, min(start + self._chunk, columns))

    def scaled(self, logits: Tensor, span: slice) -> Tensor:
        """[B, span, real tokens of the slice] of logits / temperature, a fresh copy that may be written to."""
        x = logits[:, span, : self._width].to(self.dtype, copy=True)
        return x if self.temperature == 1.0 else x.div_(self.temperature)

    def local_index(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """(column of each target in this slice [B, span, 1], whether it lies in it [B, span])."""
        index = target - self._start
        here = (index >= 0) & (index < self._width)
        return torch.where(here, index, 0).unsqueeze(-1), here

    def all_reduce(self, tensor: Tensor, op) -> Tensor:
        if self._several_ranks:
            dist.all_reduce(tensor, op=op, group=self._group)
        return tensor
