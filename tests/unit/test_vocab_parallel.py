# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy of one rank against torch's dense softmax, trl, and numerical gradients; memory in chunks.

Several tensor-parallel ranks: tests/distributed/test_distributed_utils.py.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_aligner.utils import vocab_parallel
from nemo_aligner.utils.vocab_parallel import calculate_distributed_entropy, from_parallel_logits_to_logprobs

B, S, V = 3, 6, 11


@pytest.fixture(params=[1, 2 * B * V, 1 << 24], ids=["one column", "two columns", "one chunk"])
def chunked(request, monkeypatch):
    """Run with several chunk sizes; the last chunk is sometimes short."""
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", request.param)


def inputs(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return (3 * torch.randn(B, S, V)).to(dtype), torch.randint(0, V, (B, S))


def dense_logprobs(logits, tokens, temperature=1.0, vocab_size=V):
    real = logits[..., :vocab_size].float() / temperature
    return real.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("vocab_size", [None, 9])
def test_logprobs_and_gradient_against_dense_softmax(chunked, temperature, vocab_size):
    logits, tokens = inputs()
    tokens = tokens.clamp(max=8)
    logits[..., 9:] += 50  # padding that would take all probability
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    logprobs = from_parallel_logits_to_logprobs(ours, tokens, temperature=temperature, vocab_size=vocab_size)
    expected = dense_logprobs(theirs, tokens, temperature, vocab_size or V)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-6)
    weights = torch.randn(B, S - 1)
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)
    if vocab_size:
        assert ours.grad[..., vocab_size:].abs().sum() == 0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("vocab_size", [None, 9])
def test_entropy_and_gradient_against_dense_softmax(chunked, temperature, vocab_size):
    logits, _ = inputs()
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    entropy = calculate_distributed_entropy(ours, temperature=temperature, vocab_size=vocab_size)
    real = theirs[:, :-1, : vocab_size or V] / temperature
    expected = torch.distributions.Categorical(logits=real).entropy()
    torch.testing.assert_close(entropy, expected, atol=1e-5, rtol=1e-6)
    weights = torch.randn(B, S - 1)
    (entropy * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)
    mask = torch.rand(B, S - 1) > 0.5
    masked = calculate_distributed_entropy(logits, mask, temperature, vocab_size)
    torch.testing.assert_close(masked, expected[mask].mean().detach())


def test_numerical_gradients(chunked):
    logits, tokens = inputs(torch.float64)
    logits, tokens = logits[:2, :3].requires_grad_(), tokens[:2, :3].clamp(max=8)
    assert torch.autograd.gradcheck(
        lambda x: from_parallel_logits_to_logprobs(x, tokens, temperature=0.7, vocab_size=9), logits
    )
    assert torch.autograd.gradcheck(lambda x: calculate_distributed_entropy(x, None, 0.7, 9), logits)


def test_against_trl():
    from trl import core

    logits, tokens = inputs(seed=1)
    expected = core.logprobs_from_logits(logits[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(from_parallel_logits_to_logprobs(logits, tokens), expected, atol=1e-6, rtol=1e-6)
    expected = core.entropy_from_logits(logits[:, :-1])
    torch.testing.assert_close(calculate_distributed_entropy(logits), expected, atol=1e-6, rtol=1e-6)


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


def test_tokens_outside_the_vocabulary_have_probability_zero():
    logits, tokens = inputs()
    tokens[0, 1], tokens[0, 2], tokens[0, 3] = 10, V, -100
    logprobs = from_parallel_logits_to_logprobs(logits, tokens, vocab_size=9)
    assert torch.isinf(logprobs[0, :3]).all() and (logprobs[0, :3] < 0).all()


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_large_logits_stay_finite(scale):
    logits, tokens = inputs()
    logits = (logits + scale).requires_grad_()
    logprobs, entropy = from_parallel_logits_to_logprobs(logits, tokens), calculate_distributed_entropy(logits)
    torch.testing.assert_close(logprobs, dense_logprobs(logits, tokens))
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()


def test_bf16_logits_are_computed_in_fp32_and_get_bf16_gradients():
    logits, tokens = inputs(torch.bfloat16)
    logits.requires_grad_()
    logprobs = from_parallel_logits_to_logprobs(logits, tokens)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, dense_logprobs(logits, tokens), atol=1e-6, rtol=1e-6)
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_nan_logits_in_the_dropped_column_are_never_read():
    logits, tokens = inputs()
    planted = logits.clone()
    planted[:, -1] = float("nan")
    results = []
    for x in (logits, planted):
        x.requires_grad_()
        outputs = [from_parallel_logits_to_logprobs(x, tokens), calculate_distributed_entropy(x)]
        sum(output.sum() for output in outputs).backward()
        results.append([*outputs, x.grad])
    for clean, dirty in zip(*results):
        assert torch.equal(clean, dirty)


class _LargestAllocation(TorchDispatchMode):
    """Largest fp32 result with storage of its own that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32:
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // 4)
        return result


def test_no_fp32_copy_of_all_logits_is_made(monkeypatch):
    rows, columns, vocabulary = 2, 64, 512
    chunk = 4 * rows * vocabulary
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", chunk)
    logits = torch.randn(rows, columns, vocabulary, dtype=torch.bfloat16, requires_grad=True)
    # A view whose rows are not contiguous, as models that compute [S, B, V] hand out.
    logits_view = logits.transpose(0, 1).contiguous().transpose(0, 1)
    tokens = torch.randint(0, vocabulary, (rows, columns))
    with _LargestAllocation() as seen:
        total = from_parallel_logits_to_logprobs(logits_view, tokens, temperature=0.9).sum()
        (total + calculate_distributed_entropy(logits_view).sum()).backward()
    assert logits.grad is not None
    assert chunk <= seen.largest < 2 * chunk < rows * columns * vocabulary / 4
