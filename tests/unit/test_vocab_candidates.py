# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Candidates of the vocabulary of one rank against torch's dense softmax and numerical gradients.

Several tensor- and context-parallel ranks: tests/distributed/test_vocab_parallel.py.
"""

import pytest
import torch

from nemo_aligner.parallel import vocab_parallel
from nemo_aligner.parallel.vocab_parallel import candidate_logprobs, top_logits

B, S, V, REAL = 3, 6, 11, 9


@pytest.fixture(params=[1, 2 * V, 1 << 24], ids=["one token", "two columns", "one chunk"])
def chunked(request, monkeypatch):
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", request.param)


def inputs(count=4):
    """Logits with a padding that would take all probability, and candidates, each once."""
    random = torch.Generator().manual_seed(count)
    logits = 3 * torch.randn(B, S, V, generator=random, dtype=torch.float64)
    logits[..., REAL:] += 50
    order = torch.rand(B, S, REAL, generator=random).argsort(-1)
    return logits, order[..., :count]


def dense(logits, candidates, rest_of, temperature):
    """By one softmax, and by adding up what is left of it."""
    probabilities = (logits[..., :REAL] / temperature).softmax(-1)
    chosen = probabilities.gather(-1, candidates).log()
    if not rest_of:
        return chosen
    outside = torch.ones_like(probabilities).scatter(-1, candidates[..., :rest_of], 0.0)
    rest = (probabilities * outside).sum(-1, keepdim=True)
    return torch.cat([chosen, rest.log()], -1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rest_of", [0, 3, 4])
def test_logprobs_and_gradient_against_dense_softmax(chunked, rest_of, temperature):
    logits, candidates = inputs()
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    settings = {"rest_of": rest_of, "temperature": temperature, "vocab_size": REAL}
    logprobs = candidate_logprobs(ours, candidates, **settings)
    expected = dense(theirs, candidates, rest_of, temperature)
    torch.testing.assert_close(logprobs, expected, atol=1e-12, rtol=1e-12)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=1e-11)
    assert not ours.grad[..., REAL:].any()

    again = logits.clone().requires_grad_()
    written = again * 1  # not a leaf
    logprobs = candidate_logprobs(written, candidates, overwrite_logits=True, **settings)
    (logprobs * weights).sum().backward()
    assert torch.equal(again.grad, ours.grad)


def test_a_candidate_may_come_twice():
    logits, candidates = inputs(3)
    candidates = torch.cat([candidates, candidates[..., :1]], -1)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    logprobs = candidate_logprobs(ours, candidates, rest_of=3, vocab_size=REAL)
    expected = dense(theirs, candidates, 3, 1.0)
    torch.testing.assert_close(logprobs, expected)
    logprobs.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_without_a_rest_its_log_prob_is_that_of_nothing_and_it_has_no_gradient():
    logits, candidates = inputs(REAL)
    leaf = logits.clone().requires_grad_()
    logprobs = candidate_logprobs(leaf, candidates, rest_of=REAL, vocab_size=REAL)
    assert (logprobs[..., -1] == -torch.inf).all()
    torch.where(logprobs == -torch.inf, 0.0, logprobs).sum().backward()
    assert leaf.grad.isfinite().all()


def test_a_small_rest_is_exact():
    """1 less the sum of the candidates would be 0 in float32."""
    logits = torch.zeros(1, 1, 4)
    logits[..., 0] = 40.0
    logprobs = candidate_logprobs(logits, torch.tensor([[[0]]]), rest_of=1)
    torch.testing.assert_close(logprobs[0, 0, 1], torch.tensor(3.0).log() - 40)


def test_fewer_positions_than_the_logits_have():
    logits, candidates = inputs()
    cut = candidate_logprobs(logits, candidates[:, :4], vocab_size=REAL)
    assert torch.equal(cut, candidate_logprobs(logits, candidates, vocab_size=REAL)[:, :4])
    with pytest.raises(ValueError, match="width 6 for logits of 5 positions"):
        candidate_logprobs(logits[:, :5], candidates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 4, REAL])
def test_largest_logits_against_torch(chunked, dtype, top_k):
    logits = inputs()[0].to(dtype)
    found = top_logits(logits, top_k, wanted=5, vocab_size=REAL)
    real = logits[:, :5, :REAL].float()
    values, ids = real.topk(top_k)
    assert found.logits.dtype == torch.float32
    torch.testing.assert_close(found.logits, values - values[..., :1], atol=1e-6, rtol=0)
    torch.testing.assert_close(real.gather(-1, found.token_ids), values)
    expected = (real - values[..., :1]).logsumexp(-1)
    torch.testing.assert_close(found.log_sum_exp, expected, atol=1e-6, rtol=1e-6)
