# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The PPO actor: log-probs, loss and gradient against plain PyTorch; the reference policy; bad
input.
"""

import math

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.core.errors import UserError
from nemo_aligner.models.nlp.gpt import megatron_gpt_policy
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import MegatronGPTActorModel
from nemo_aligner.training.optim import optimizer_step
from tests.tiny_models import PPO, logprobs_by_hand, tiny_config


def make_actor(tokenizer_dir, **ppo):
    cfg = tiny_config(tokenizer_dir, ppo=OmegaConf.merge(PPO, ppo), micro_batch_size=2)
    return MegatronGPTActorModel(cfg)


def make_batch(actor):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, actor.tokenizer.vocab_size, (4, 9), generator=generator)
    mask = torch.zeros(4, 8)
    for row, (first, last) in enumerate([(2, 6), (1, 8), (4, 5), (0, 3)]):
        mask[row, first:last] = 1
    actor.set_eval()
    return {
        "response_tokens": tokens,
        "is_end": torch.tensor([True, True, False, True]),
        "mask": mask,
        "advantages": torch.randn(4, 8, generator=generator),
        "prev_logprobs": actor.get_inference_log_probs(tokens)
        + 0.4 * torch.randn(4, 8, generator=generator),
    }


@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.7, 0), (0.7, 3)])
def test_logprobs_at_the_sampling_temperature(tiny_tokenizer_dir, temperature, top_k, monkeypatch):
    """Those of the whole distribution, with a warning if tokens are drawn from another one."""
    said = []
    monkeypatch.setattr(megatron_gpt_policy.logging, "warning", said.append)
    sampling = {"temperature": temperature, "top_k": top_k}
    actor = make_actor(tiny_tokenizer_dir, sampling_params=sampling)
    assert [text.startswith("top_k, top_p, repetition_penalty or min_le") for text in said] == (
        [True] if top_k else []
    )
    tokens = make_batch(actor)["response_tokens"]
    expected, _ = logprobs_by_hand(actor, tokens, temperature)
    torch.testing.assert_close(
        actor.get_inference_log_probs(tokens), expected, atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        actor.get_inference_log_probs(tokens, 3), expected, atol=1e-5, rtol=1e-5
    )


def test_a_loss_of_ones_own_gets_what_its_parameters_name(tiny_tokenizer_dir):
    """Whatever the micro-batches; other columns are there for others."""
    actor = make_actor(tiny_tokenizer_dir)
    batch = make_batch(actor)
    tokens, mask, scores = batch["response_tokens"], batch["mask"], torch.arange(4.0)
    logprobs, entropy = logprobs_by_hand(actor, tokens, 1.0)
    per_token = scores.unsqueeze(1) * logprobs + entropy
    columns = {"tokens": tokens, "scores": scores, "others": scores}

    def own(logprobs, entropy, scores, weights):
        loss = (weights * (scores.unsqueeze(1) * logprobs + entropy)).sum()
        return loss, {"loss": loss.detach(), "entropy": (weights * entropy).sum().detach()}

    for reduction, weights in {
        "token": mask / mask.sum(),
        "sequence": mask / mask.sum(1, keepdim=True) / 4,
    }.items():
        loss, metrics = actor.compute_loss(
            own, columns, forward_only=True, mask=mask, loss_reduction=reduction
        )
        assert loss == metrics["loss"] == pytest.approx(float((weights * per_token).sum()), 1e-5)
        assert metrics["entropy"] == pytest.approx(float((weights * entropy).sum()), 1e-5)


def test_loss_is_the_clipped_surrogate_of_the_samples_that_ended(tiny_tokenizer_dir):
    actor = make_actor(tiny_tokenizer_dir)
    batch = make_batch(actor)
    logprobs, entropy = logprobs_by_hand(actor, batch["response_tokens"], 1.0)
    total, entropies, ratios, count = 0.0, 0.0, 0.0, 0
    for row in range(4):
        for column in range(8):
            if not batch["mask"][row, column] or not batch["is_end"][row]:
                continue
            ratio = float((logprobs[row, column] - batch["prev_logprobs"][row, column]).exp())
            advantage = float(batch["advantages"][row, column])
            total += max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
            entropies += float(entropy[row, column])
            ratios += ratio
            count += 1
    expected = total / count - 0.01 * entropies / count
    loss, metrics = actor.get_loss_and_metrics(batch, forward_only=True)
    assert loss == pytest.approx(expected, rel=1e-4)
    assert metrics["scaled_entropy"] == pytest.approx(0.01 * entropies / count, rel=1e-4)
    assert metrics["ppo_ratio"] == pytest.approx(ratios / count, rel=1e-4)


def test_the_mean_by_a_constant_scales_the_loss_and_leaves_the_metrics(tiny_tokenizer_dir):
    found = {}
    for reduction, size in (("token", 4), ("constant", 4), ("constant", 1)):
        actor = make_actor(tiny_tokenizer_dir, loss_reduction=reduction)
        actor.cfg.micro_batch_size = size
        batch = make_batch(actor)
        found[reduction, size] = actor.get_loss_and_metrics(batch, forward_only=True)
    tokens = (batch["mask"] * batch["is_end"].unsqueeze(-1)).sum().item()
    loss, expected = found["token", 4]
    for size in (4, 1):
        value, metrics = found["constant", size]
        assert value == pytest.approx(loss * tokens / 4 / actor.longest, rel=1e-5)
        means = set(metrics) - {"loss", "scaled_entropy"}
        assert means >= {"ppo_ratio", "approx_kl", "entropy"}
        for name in means:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


def test_variants_of_the_loss_against_a_loop(tiny_tokenizer_dir):
    """Dual clip, KL to the reference in the loss, truncated responses; and their metrics."""
    settings = {
        "dual_clip": 1.3,
        "kl_loss_coef": 0.4,
        "kl_loss_estimator": "k2",
        "train_on_truncated": True,
    }
    actor = make_actor(tiny_tokenizer_dir, entropy_bonus=0.0, **settings)
    batch = make_batch(actor)
    batch["init_logprobs"] = batch["prev_logprobs"] + torch.randn(
        4, 8, generator=torch.Generator().manual_seed(3)
    )
    logprobs, entropy = logprobs_by_hand(actor, batch["response_tokens"], 1.0)
    total, clipped, bounded, kls, approx_kl, entropies, count = 0.0, 0, 0, 0.0, 0.0, 0.0, 0
    for row, column in batch["mask"].nonzero().tolist():
        log_ratio = float(logprobs[row, column] - batch["prev_logprobs"][row, column])
        ratio, advantage = math.exp(log_ratio), float(batch["advantages"][row, column])
        loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
        if advantage < 0:
            bounded += loss > -advantage * 1.3
            loss = min(loss, -advantage * 1.3)
        clipped += (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
        kl = 0.5 * float(logprobs[row, column] - batch["init_logprobs"][row, column]) ** 2
        total, kls, approx_kl = (
            total + loss + 0.4 * kl,
            kls + kl,
            approx_kl + ratio - 1 - log_ratio,
        )
        entropies, count = entropies + float(entropy[row, column]), count + 1
    assert (
        clipped and bounded and count == batch["mask"].sum() > batch["mask"][batch["is_end"]].sum()
    )

    loss, metrics = actor.get_loss_and_metrics(batch, forward_only=True)
    assert loss == pytest.approx(total / count, rel=1e-4)
    expected = {
        "ppo_clip_fraction": clipped,
        "dual_clip_fraction": bounded,
        "kl_loss": kls,
        "approx_kl": approx_kl,
        "entropy": entropies,
        "scaled_entropy": 0.0,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value / count, rel=1e-3), name
    hidden = batch["mask"] == 0
    poisoned = {
        k: v.masked_fill(hidden, torch.nan) if v.dtype == torch.float32 else v
        for k, v in batch.items()
    }
    poisoned["mask"] = batch["mask"]
    assert actor.get_loss_and_metrics(poisoned, forward_only=True) == (loss, metrics)


def test_reference_policy_equals_the_policy_until_it_is_trained(tiny_tokenizer_dir):
    actor = make_actor(tiny_tokenizer_dir)
    with pytest.raises(UserError, match="set_reference_policy"):
        actor.get_init_policy_logprobs(torch.zeros(1, 2, dtype=torch.long))
    actor.set_reference_policy()
    optimizer, scheduler = actor.setup_megatron_optimization(max_steps=10)
    batch = make_batch(actor)
    before = actor.get_inference_log_probs(batch["response_tokens"])
    assert torch.equal(actor.get_init_policy_logprobs(batch["response_tokens"]), before)
    actor.prepare_for_training_step()
    actor.get_loss_and_metrics(batch)
    optimizer_step(optimizer, scheduler, 1.0)
    actor.prepare_for_inference()
    assert torch.equal(actor.get_init_policy_logprobs(batch["response_tokens"]), before)
    assert not torch.equal(actor.get_inference_log_probs(batch["response_tokens"]), before)


def test_response_without_seeds_depends_on_the_prompt_alone(tiny_tokenizer_dir):
    actor = make_actor(tiny_tokenizer_dir)
    actor.prepare_for_inference()
    text = torch.full((3, 24), actor.tokenizer.eos_id)
    text[0, :3], text[1, :5], text[2, :3] = (
        torch.tensor([1, 2, 3]),
        torch.tensor([9, 8, 7, 6, 5]),
        torch.tensor([4, 2, 3]),
    )
    lengths = torch.tensor([3, 5, 3])
    together = actor.infer({"text": text, "length": lengths})
    for row in range(3):
        alone = actor.infer({"text": text[row : row + 1], "length": lengths[row : row + 1]})
        total = int(alone["response_lengths"])
        assert total == int(together["response_lengths"][row])
        assert torch.equal(
            alone["response_tokens"][0, :total], together["response_tokens"][row, :total]
        )
    assert set(together) == {"response_tokens", "response_lengths", "prompt_lengths", "is_end"}
