# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs, entropy and candidates of one rank against torch's dense softmax; their memory.

Several tensor- and context-parallel ranks: tests/distributed/test_vocab_parallel.py; NaN in the
dropped column: test_masked_slots.py.
"""

import pytest
import torch

from benchmarks import logprob_memory
from nemo_aligner.parallel import vocab_parallel
from nemo_aligner.parallel.vocab_parallel import (
    DistributedLogprob,
    candidate_logprobs,
    from_parallel_logits_to_logprobs,
    logprobs_and_entropy,
    top_logits,
)

B, S, V, REAL = 3, 6, 11, 9


@pytest.fixture(
    params=[1, 2 * V, 2 * B * V, 1 << 24],
    ids=["one token", "two rows", "two columns", "one chunk"],
)
def chunked(request, monkeypatch):
    """Run with several chunk sizes; the last chunk of rows or columns is sometimes short."""
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", request.param)


def inputs(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return (3 * torch.randn(B, S, V)).to(dtype), torch.randint(0, V, (B, S))


@pytest.mark.parametrize("vocab_size, temperature", [(9, 0.7), (V, 1.0)])
def test_float64_against_torch(chunked, vocab_size, temperature):
    """Both results and the gradient of a mix of them, in float64; also the one of the log-probs
    alone.
    """
    logits, tokens = inputs(torch.float64)
    tokens = tokens.clamp(max=8)
    logits[..., vocab_size:] += 50  # padding that would take all probability
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    own = {"temperature": temperature, "vocab_size": vocab_size}
    logprobs, entropy = logprobs_and_entropy(ours, tokens, **own)
    dense = (theirs[:, :-1, :vocab_size] / temperature).log_softmax(-1)
    expected = dense.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    expected_entropy = -(dense.exp() * dense).sum(-1)
    torch.testing.assert_close(logprobs, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-12, rtol=1e-12)
    a, b = torch.randn(2, B, S - 1, dtype=torch.float64)
    (a * logprobs + b * entropy).sum().backward()
    (a * expected + b * expected_entropy).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=1e-11)
    assert not ours.grad[..., vocab_size:].any() and not ours.grad[:, -1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_entropy_beside_them_changes_no_bit_of_the_logprobs(chunked, dtype):
    logits, tokens = inputs(dtype)
    gradients = []
    for with_entropy in (False, True):
        x = logits.clone().requires_grad_()
        with_one, plain = logprobs_and_entropy, from_parallel_logits_to_logprobs
        logprobs = with_one(x, tokens)[0] if with_entropy else plain(x, tokens)
        assert torch.equal(logprobs, plain(logits, tokens, inference_only=True))
        gradients += torch.autograd.grad(logprobs.sum(), x)
    assert torch.equal(*gradients)
    assert not any(r.requires_grad for r in logprobs_and_entropy(x, tokens, inference_only=True))


def test_options():
    logits, tokens = inputs()
    shifted = from_parallel_logits_to_logprobs(logits, tokens)
    aligned = from_parallel_logits_to_logprobs(logits, tokens.roll(-1, 1), ignore_last=False)
    assert shifted.shape == (B, S - 1) and aligned.shape == (B, S)
    assert torch.equal(aligned[:, :-1], shifted)
    expected = logits.log_softmax(-1)[:, -1].gather(-1, tokens[:, :1]).squeeze(-1)
    torch.testing.assert_close(aligned[:, -1], expected)
    assert torch.equal(from_parallel_logits_to_logprobs(logits, tokens, True, True), shifted)
    before = logits.clone()
    from_parallel_logits_to_logprobs(logits, tokens, temperature=0.5)
    assert torch.equal(logits, before)  # the working copy is a copy
    with pytest.raises(ValueError, match="temperature=0"):
        from_parallel_logits_to_logprobs(logits, tokens, temperature=0)
    assert torch.equal(DistributedLogprob.apply(logits, tokens.roll(-1, 1)), aligned)
    outside = tokens.index_fill(1, torch.tensor([1]), 10)  # of the vocabulary: no probability
    outside[:, 2], outside[:, 3] = V, -100
    logprobs = from_parallel_logits_to_logprobs(logits, outside, vocab_size=9)
    assert (logprobs[:, :3] == -torch.inf).all()
    with pytest.raises(ValueError, match="width 7 for logits of 6"):
        from_parallel_logits_to_logprobs(logits, torch.zeros(B, 7, dtype=torch.int64))


def test_logits_may_be_wider_than_the_tokens():
    """A model pads the sequence to split it; the padding gives no number and gets no gradient."""
    logits, tokens = inputs()
    for x in (logits, torch.cat([logits, torch.full((B, 2, V), float("nan"))], 1)):
        x.requires_grad_()
        for ignore_last in (True, False):
            results = logprobs_and_entropy(x, tokens, ignore_last=ignore_last)
            expected = logprobs_and_entropy(logits, tokens, ignore_last=ignore_last)
            for mine, theirs in zip(results, expected, strict=True):
                assert torch.equal(mine, theirs) and mine.shape == (B, S - ignore_last)
            (gradient,) = torch.autograd.grad(results[0].sum() + results[1].sum(), x)
            (whole,) = torch.autograd.grad(expected[0].sum() + expected[1].sum(), logits)
            assert torch.equal(gradient[:, :S], whole) and not gradient[:, S:].any()


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_large_logits_stay_finite(scale):
    logits, tokens = inputs()
    logits = (logits + scale).requires_grad_()
    logprobs = from_parallel_logits_to_logprobs(logits, tokens)
    entropy = logprobs_and_entropy(logits, tokens)[1]
    dense = logits.detach().log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs, dense)
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()


def test_unused_tokens_may_be_anything(chunked):
    """As in a loss: a selection (`torch.where`) of the tokens that count; the others' gradient is
    exactly 0.
    """
    logits, tokens = inputs()
    tokens = tokens.clamp(max=8)
    used = torch.tensor([[1, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 0]]).bool()
    other = logits.clone(), tokens.clone()
    other[0][:, :-1][~used] = float("nan")
    other[1][:, 1:][~used] = torch.tensor([-1, -100, V, 2**40, 10]).repeat(2)[: (~used).sum()]
    results = []
    for x, y in ((logits, tokens), other):
        x.requires_grad_()
        numbers = logprobs_and_entropy(x, y, vocab_size=9)
        logprobs, entropy = (torch.where(used, each, 0.0) for each in numbers)
        results.append([logprobs, *torch.autograd.grad((logprobs + entropy).sum(), x)])
    for clean, dirty in zip(*results, strict=True):
        assert clean.isfinite().all() and torch.equal(clean, dirty)
    assert not dirty[:, :-1][~used].any()


# --- the gradient in the place of the logits ---------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_takes_the_place_of_the_logits(chunked, dtype, with_entropy):
    source, tokens = inputs(dtype)
    source.requires_grad_()
    weights, gradients = torch.randn(B, S - 1), []
    for overwrite in (False, True):
        logits = source.clone()
        before = logits.detach().clone()
        logprobs, entropy = logprobs_and_entropy(
            logits, tokens, temperature=0.6, vocab_size=9, overwrite_logits=overwrite
        )
        assert torch.equal(logits, before)  # forward only reads
        loss = (weights * logprobs).sum() + (entropy.square().sum() if with_entropy else 0.0)
        gradients += torch.autograd.grad(loss, logits)
        assert (gradients[-1].data_ptr() == logits.data_ptr()) == overwrite
        assert torch.equal(logits, before) != overwrite
    assert torch.equal(*gradients) and gradients[0].any()
    # Into a leaf, through the copy that Megatron makes of half-precision outputs.
    copies = [source.to(torch.float32, copy=True) for _ in range(2)]
    from_parallel_logits_to_logprobs(copies[0], tokens, overwrite_logits=True).sum().backward()
    whole = from_parallel_logits_to_logprobs(copies[1], tokens).sum()
    (expected,) = torch.autograd.grad(whole, source)
    assert torch.equal(source.grad, expected)


def test_overwritten_logits_that_are_needed_again_are_an_error():
    source, tokens = inputs()
    source.requires_grad_()
    written = "modified by an inplace operation"

    logits = source.clone()
    loss = from_parallel_logits_to_logprobs(logits, tokens, overwrite_logits=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=written):  # the same graph twice
        loss.backward()

    logits = source.clone()  # another function of the same logits
    results = [logprobs_and_entropy(logits, tokens)[1]]
    results += [from_parallel_logits_to_logprobs(logits, tokens, overwrite_logits=True)]
    with pytest.raises(RuntimeError, match=written):
        (results[0].sum() + results[1].sum()).backward()

    logits = source.tanh()  # its own backward needs its output
    with pytest.raises(RuntimeError, match=written):
        from_parallel_logits_to_logprobs(logits, tokens, overwrite_logits=True).sum().backward()

    with pytest.raises(ValueError, match="on a leaf"):
        from_parallel_logits_to_logprobs(source, tokens, overwrite_logits=True)
    with torch.no_grad():  # nothing will be written
        from_parallel_logits_to_logprobs(source.detach(), tokens, overwrite_logits=True)


# --- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", logprob_memory.CASES)
def test_peak_memory_is_far_below_a_third_of_the_naive_way(case, dtype):
    figures = logprob_memory.measure(case, vocab=32768, dtype=dtype, elements=1 << 22, repeats=0)
    buffers = 4 * 4 * vocab_parallel.CHUNK_ELEMENTS  # a few blocks in float32, whatever B and S
    assert 0 < figures["blockwise bytes"] <= buffers + 2**16 < figures["naive bytes"] / 3
    assert figures["naive bytes"] >= 4 << 22  # at least one float32 copy: the measurement sees it


# --- candidates of the vocabulary -------------------------------------------------------------


def scored(count=4):
    """Logits with a padding that would take all probability, and candidates, each once."""
    random = torch.Generator().manual_seed(count)
    logits = 3 * torch.randn(B, S, V, generator=random, dtype=torch.float64)
    logits[..., REAL:] += 50
    order = torch.rand(B, S, REAL, generator=random).argsort(-1)
    return logits, order[..., :count]


def dense_candidates(logits, candidates, rest_of, temperature):
    """By one softmax, and by adding up what is left of it."""
    probabilities = (logits[..., :REAL] / temperature).softmax(-1)
    chosen = probabilities.gather(-1, candidates).log()
    if not rest_of:
        return chosen
    outside = torch.ones_like(probabilities).scatter(-1, candidates[..., :rest_of], 0.0)
    rest = (probabilities * outside).sum(-1, keepdim=True)
    return torch.cat([chosen, rest.log()], -1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("rest_of", "is_twice"), [(0, False), (3, False), (3, True), (4, False)])
def test_logprobs_and_gradient_against_dense_softmax(chunked, rest_of, is_twice, temperature):
    """Also of a candidate that comes twice, beside those that leave a rest."""
    logits, candidates = scored()
    if is_twice:
        candidates[..., 3] = candidates[..., 0]
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    settings = {"rest_of": rest_of, "temperature": temperature, "vocab_size": REAL}
    logprobs = candidate_logprobs(ours, candidates, **settings)
    expected = dense_candidates(theirs, candidates, rest_of, temperature)
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


def test_without_a_rest_its_log_prob_is_that_of_nothing_and_it_has_no_gradient():
    logits, candidates = scored(REAL)
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
    logits, candidates = scored()
    cut = candidate_logprobs(logits, candidates[:, :4], vocab_size=REAL)
    assert torch.equal(cut, candidate_logprobs(logits, candidates, vocab_size=REAL)[:, :4])
    with pytest.raises(ValueError, match="width 6 for logits of 5 positions"):
        candidate_logprobs(logits[:, :5], candidates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 4, REAL])
def test_largest_logits_against_torch(chunked, dtype, top_k):
    logits = scored()[0].to(dtype)
    found = top_logits(logits, top_k, wanted=5, vocab_size=REAL)
    real = logits[:, :5, :REAL].float()
    values, ids = real.topk(top_k)
    assert found.logits.dtype == torch.float32
    torch.testing.assert_close(found.logits, values - values[..., :1], atol=1e-6, rtol=0)
    torch.testing.assert_close(real.gather(-1, found.token_ids), values)
    expected = (real - values[..., :1]).logsumexp(-1)
    torch.testing.assert_close(found.log_sum_exp, expected, atol=1e-6, rtol=1e-6)
