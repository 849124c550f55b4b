# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The policy of REINFORCE: loss and gradient against a naive loop, plain PyTorch and PPO's loss at
a ratio of 1; what does not count changes nothing.
"""

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.models.alignable_interface import PolicyWithReference
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import (
    MegatronGPTReinforceActorModel,
)
from nemo_aligner.training.optim import optimizer_step
from tests.tiny_models import PPO, logprobs_by_hand, tiny_config

TEMPERATURE = 0.7


def make_model(tokenizer_dir, micro_batch_size=2, **reinforce):
    settings = OmegaConf.merge(PPO, {"sampling_params": {"temperature": TEMPERATURE}}, reinforce)
    return MegatronGPTReinforceActorModel(
        tiny_config(tokenizer_dir, reinforce=settings, micro_batch_size=micro_batch_size)
    )


def make_batch(model):
    """Responses of 4, 7 (which did not end), 1 and no tokens, and one of 3."""
    tokens = torch.randint(
        0, model.tokenizer.vocab_size, (6, 9), generator=torch.Generator().manual_seed(5)
    )
    mask = torch.zeros(6, 8)
    spans = [(2, 6), (1, 8), (4, 5), (0, 0), (3, 6), (0, 0)]
    for row, (first, last) in enumerate(spans):
        mask[row, first:last] = 1
    return {
        "response_tokens": tokens,
        "mask": mask,
        "is_end": torch.tensor([True, False, True, True, True, True]),
        "rewards_with_kl": torch.tensor([1.0, 3.0, -2.0, 0.5, 0.25, 4.0]),
        "baseline": torch.tensor([0.2, 0.1, 0.3, 0.5, -0.4, 1.0]),
    }


def losses_of_samples(batch, logprobs):
    """Losses of the tokens of each sample that counts."""
    losses = []
    for row in range(len(logprobs)):
        advantage = batch["rewards_with_kl"][row] - batch["baseline"][row]
        counted = [c for c in range(8) if batch["mask"][row, c] and batch["is_end"][row]]
        losses.append([float(-advantage * logprobs[row, c]) for c in counted])
    return losses


@pytest.mark.parametrize("reduction", ["token", "sequence", "microbatch"])
def test_loss_is_that_of_a_naive_loop(tiny_tokenizer_dir, reduction):
    model = make_model(tiny_tokenizer_dir, loss_reduction=reduction)
    batch = make_batch(model)
    logprobs, _ = logprobs_by_hand(model, batch["response_tokens"], TEMPERATURE)
    losses = losses_of_samples(batch, logprobs)

    def mean(rows):
        tokens = [loss for row in rows for loss in row]
        return sum(tokens) / len(tokens)

    counted = [row for row in losses if row]
    expected = {
        "token": mean(losses),
        "sequence": sum(mean([row]) for row in counted) / len(counted),
        "microbatch": (mean(losses[:2]) + mean(losses[2:4]) + mean(losses[4:])) / 3,
    }[reduction]
    loss, metrics = model.get_loss_and_metrics(batch, forward_only=True)
    assert loss == pytest.approx(expected, rel=1e-5) and metrics == {"loss": loss}


def test_truncated_and_masked_samples_change_nothing(tiny_tokenizer_dir):
    """Other rewards, tokens and padding where nothing counts; other micro-batches."""

    def step(batch, micro_batch_size=2):
        model = make_model(tiny_tokenizer_dir, micro_batch_size)
        optimizer, scheduler = model.setup_megatron_optimization(max_steps=10)
        model.prepare_for_training_step()
        loss, _ = model.get_loss_and_metrics(batch)
        return loss, optimizer_step(optimizer, scheduler, 1.0)

    batch = make_batch(make_model(tiny_tokenizer_dir))
    expected = step(batch)
    poisoned = {key: batch[key].clone() for key in ("rewards_with_kl", "baseline")}
    for row in (1, 3, 5):
        poisoned["rewards_with_kl"][row] = float("nan")
    tokens = batch["response_tokens"].clone()
    tokens[0, 7:], tokens[1, 1:] = 11, 12
    wide = {
        "response_tokens": torch.nn.functional.pad(tokens, (0, 6), value=3),
        "mask": torch.nn.functional.pad(batch["mask"], (0, 6)),
    }
    for changes, micro_batch_size in ((poisoned, 2), (wide, 1), ({}, 6)):
        assert step(batch | changes, micro_batch_size) == pytest.approx(expected, rel=1e-5)
    nothing = {"is_end": torch.zeros(6, dtype=torch.bool)}
    assert step(batch | nothing) == (0.0, 0.0)


def test_log_probs_are_those_of_the_sampler_and_of_the_reference(tiny_tokenizer_dir):
    model = make_model(tiny_tokenizer_dir)
    assert isinstance(model, PolicyWithReference) and model.temperature == TEMPERATURE
    model.set_reference_policy()
    tokens = make_batch(model)["response_tokens"]
    logprobs = model.get_inference_log_probs(tokens)
    expected = logprobs_by_hand(model, tokens, TEMPERATURE)[0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(model.get_init_policy_logprobs(tokens), logprobs)
    greedy = make_model(tiny_tokenizer_dir, sampling_params={"use_greedy": True})
    assert greedy.temperature == 1.0
