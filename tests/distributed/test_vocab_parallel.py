# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs, entropy and candidates over slices of the vocabulary and shares of the positions,
against one dense softmax.

CP2 and TP2 x CP2 on four real gloo ranks, in one launch.
"""

import torch
import torch.nn.functional as F
from megatron.core.parallel_state import destroy_model_parallel

from nemo_aligner.parallel import parallel_state
from nemo_aligner.parallel.collectives import take_share
from nemo_aligner.parallel.vocab_parallel import (
    calculate_distributed_entropy,
    candidate_logprobs,
    from_parallel_logits_to_logprobs,
    logprobs_and_entropy,
    top_logits,
)
from tests.distributed.launcher import run_ranks

B, V = 2, 12


def _mine(tensor: torch.Tensor, tp: int, cp: int) -> torch.Tensor:
    """Pad the width to a multiple of 2*CP, take this rank's share of it and slice of the
    vocabulary.
    """
    padded = F.pad(tensor, (0, 0, 0, -tensor.size(1) % (2 * cp)))
    slices = take_share(padded, 1).chunk(tp, -1)
    return slices[parallel_state.get_tensor_model_parallel_rank()].contiguous()


def _check_candidates(tp: int, cp: int, width: int, vocab_size: int, temperature: float):
    """Candidates that lie in all slices of the vocabulary, with the rest; and the largest."""
    random = torch.Generator().manual_seed(width)
    dense = 3 * torch.randn(B, width, V, generator=random, dtype=torch.float64)
    columns = width - 1  # fewer than the logits have
    candidates = torch.rand(B, columns, vocab_size, generator=random).argsort(-1)[..., :4]
    x = dense.clone().requires_grad_()
    p = (x[:, :columns, :vocab_size] / temperature).softmax(-1)
    outside = torch.ones_like(p).scatter(-1, candidates[..., :3], 0.0)
    rest = (p * outside).sum(-1, keepdim=True)
    expected = torch.cat([p.gather(-1, candidates), rest], -1).log()
    a = torch.randn(expected.shape, generator=random, dtype=torch.float64)
    (a * expected).sum().backward()
    leaf = _mine(dense, tp, cp).requires_grad_()
    settings = {"rest_of": 3, "temperature": temperature, "vocab_size": vocab_size}
    logprobs = candidate_logprobs(leaf, candidates, **settings)
    torch.testing.assert_close(logprobs, expected, atol=1e-12, rtol=1e-12)
    (gradient,) = torch.autograd.grad((a * logprobs).sum(), leaf)
    torch.testing.assert_close(gradient, _mine(x.grad, tp, cp), atol=1e-12, rtol=1e-10)

    for top_k in (1, 5, vocab_size):  # also more than a slice has
        found = top_logits(leaf, top_k, columns, vocab_size)
        real = dense[:, :columns, :vocab_size]
        values, ids = real.topk(top_k)
        assert torch.equal(found.token_ids, ids)
        torch.testing.assert_close(found.logits, values - values[..., :1])
        torch.testing.assert_close(found.log_sum_exp, (real - values[..., :1]).logsumexp(-1))


def _check(tp: int, cp: int, width: int, ignore_last: bool, vocab_size: int, temperature: float):
    """Every rank has the whole results, and of the gradient its slice of the vocabulary and share
    of the positions.
    """
    _check_candidates(tp, cp, width, vocab_size, temperature)
    torch.manual_seed(width)
    dense = 3 * torch.randn(B, width, V, dtype=torch.float64)
    targets = torch.randint(0, vocab_size, (B, width))
    columns = width - ignore_last
    x = dense.clone().requires_grad_()
    softmax = (x[:, :columns, :vocab_size] / temperature).log_softmax(-1)
    aligned = targets[:, 1:] if ignore_last else targets
    expected = softmax.gather(-1, aligned.unsqueeze(-1)).squeeze(-1)
    expected_entropy = -(softmax.exp() * softmax).sum(-1)
    a, b = torch.randn(2, B, columns, dtype=torch.float64)
    (a * expected + b * expected_entropy).sum().backward()

    def mine(tensor):
        return _mine(tensor, tp, cp)

    settings = {"ignore_last": ignore_last, "temperature": temperature, "vocab_size": vocab_size}
    leaf = mine(dense).requires_grad_()
    for overwrite in (False, True):
        logits = leaf.clone()
        own = {"overwrite_logits": overwrite, **settings}
        logprobs, entropy = logprobs_and_entropy(logits, targets, **own)
        torch.testing.assert_close(logprobs, expected, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(entropy, expected_entropy, atol=1e-12, rtol=1e-12)
        (gradient,) = torch.autograd.grad((a * logprobs + b * entropy).sum(), logits)
        torch.testing.assert_close(gradient, mine(x.grad), atol=1e-12, rtol=1e-10)
        again = from_parallel_logits_to_logprobs(leaf, targets, True, **settings)
        assert torch.equal(again, logprobs)
    if ignore_last:
        mask = torch.rand(B, columns, generator=torch.Generator().manual_seed(0)) > 0.4
        mean = calculate_distributed_entropy(leaf, mask, temperature, vocab_size)
        torch.testing.assert_close(mean, expected_entropy[mask].mean(), atol=1e-12, rtol=1e-12)


def _splits():
    for tp, cp in [(2, 2), (1, 2)]:
        parallel_state.initialize(tensor_model_parallel_size=tp, context_parallel_size=cp)
        # A width that must be padded, the last slice of the vocabulary partly and wholly padding,
        # one short sequence.
        cases = [(8, V, 1.0), (9, 10, 0.7), (11, 5, 1.3), (2, 9, 1.0)]
        for width, vocab_size, temperature in cases:
            for ignore_last in (True, False):
                _check(tp, cp, width, ignore_last, vocab_size, temperature)
        destroy_model_parallel()


def test_slices_and_shares_give_the_dense_numbers():
    run_ranks(_splits, 4, 110)
