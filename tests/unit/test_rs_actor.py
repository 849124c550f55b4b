# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The policy of rejection sampling: log-probs, loss and gradient against plain PyTorch; what does
not count changes nothing.
"""

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTRSModel
from tests.tiny_models import PPO, logprobs_by_hand, tiny_config


def make_model(tokenizer_dir, micro_batch_size=2, **rs):
    settings = OmegaConf.merge(PPO, {"sampling_params": {"temperature": 0.7}}, rs)
    return MegatronGPTRSModel(
        tiny_config(tokenizer_dir, rs=settings, micro_batch_size=micro_batch_size)
    )


def make_batch(model):
    """Responses of 4, 7, 1 and no tokens."""
    tokens = torch.randint(
        0, model.tokenizer.vocab_size, (4, 9), generator=torch.Generator().manual_seed(5)
    )
    mask = torch.zeros(4, 8)
    for row, (first, last) in enumerate([(2, 6), (1, 8), (4, 5), (0, 0)]):
        mask[row, first:last] = 1
    return {"response_tokens": tokens, "mask": mask}


def gradients(model):
    return torch.cat(
        [p.main_grad.flatten() for chunk in model.unwrapped() for p in chunk.parameters()]
    ).clone()


def test_logprobs_are_the_models_own_whatever_the_sampling_temperature(tiny_tokenizer_dir):
    model = make_model(tiny_tokenizer_dir)
    assert model.generation_params.temperature == 0.7
    tokens = make_batch(model)["response_tokens"]
    expected = logprobs_by_hand(model, tokens)[0]
    torch.testing.assert_close(
        model.get_inference_log_probs(tokens), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("reduction", ["token", "sequence", "microbatch"])
def test_loss_is_the_likelihood_of_the_responses(tiny_tokenizer_dir, reduction):
    model = make_model(tiny_tokenizer_dir, loss_reduction=reduction)
    batch = make_batch(model)
    (logprobs, _), mask = logprobs_by_hand(model, batch["response_tokens"]), batch["mask"].bool()
    samples = [sample[keep] for sample, keep in zip(logprobs, mask, strict=True)]
    expected = {
        "token": -torch.cat(samples).mean(),
        # The empty response does not count.
        "sequence": -(samples[0].mean() + samples[1].mean() + samples[2].mean()) / 3,
        "microbatch": -(torch.cat(samples[:2]).mean() + torch.cat(samples[2:]).mean()) / 2,
    }[reduction]
    loss, metrics = model.get_loss_and_metrics(batch, forward_only=True)
    assert loss == pytest.approx(float(expected), rel=1e-5) and metrics == {"loss": loss}


def test_nothing_depends_on_padding_or_on_the_micro_batch(tiny_tokenizer_dir):
    """Loss and gradient with other tokens after the responses, wider padding, other
    micro-batches.
    """

    def step(batch, micro_batch_size=2):
        model = make_model(tiny_tokenizer_dir, micro_batch_size)
        model.setup_megatron_optimization(max_steps=10)
        model.prepare_for_training_step()
        loss, _ = model.get_loss_and_metrics(batch)
        return loss, gradients(model)

    batch = make_batch(make_model(tiny_tokenizer_dir))
    loss, gradient = step(batch)
    other = batch["response_tokens"].clone()
    other[0, 7:], other[2, 6:], other[3] = 11, 12, 13
    wide = torch.nn.functional.pad(other, (0, 6), value=3)
    for changed, micro_batch_size in (
        ({"response_tokens": other}, 2),
        ({"response_tokens": wide, "mask": torch.nn.functional.pad(batch["mask"], (0, 6))}, 1),
        ({}, 4),
    ):
        changed_loss, changed_gradient = step(batch | changed, micro_batch_size)
        assert changed_loss == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(changed_gradient, gradient, atol=1e-7, rtol=1e-4)
