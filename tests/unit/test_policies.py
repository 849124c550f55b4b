# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The policies of PPO, REINFORCE and rejection sampling: log-probs, losses and gradients against
plain PyTorch and naive loops; the reference policy; what does not count changes nothing.
"""

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.core.errors import UserError
from nemo_aligner.core.losses import loss_weights, ppo_actor_loss
from nemo_aligner.models.nlp.gpt.megatron_gpt_policy import (
    MegatronGPTActorModel,
    MegatronGPTReinforceActorModel,
    MegatronGPTRSModel,
)
from nemo_aligner.training.optim import optimizer_step
from tests.tiny_models import PPO, logprobs_by_hand, tiny_config

CLASSES = {"ppo": MegatronGPTActorModel, "reinforce": MegatronGPTReinforceActorModel}
CLASSES["rs"] = MegatronGPTRSModel


def make(kind, tokenizer_dir, micro_batch_size=2, **settings):
    section = {kind: OmegaConf.merge(PPO, settings)}
    return CLASSES[kind](tiny_config(tokenizer_dir, micro_batch_size=micro_batch_size, **section))


def batch_of(model):
    """Six responses: of 4 tokens, of 7 (which did not end), of 1, of none, of 3 and of none."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, model.tokenizer.vocab_size, (6, 9), generator=generator)
    mask = torch.zeros(6, 8)
    for row, (first, last) in enumerate([(2, 6), (1, 8), (4, 5), (0, 0), (3, 6), (0, 0)]):
        mask[row, first:last] = 1
    model.set_eval()
    noise = 0.4 * torch.randn(6, 8, generator=generator)
    return {
        "response_tokens": tokens,
        "mask": mask,
        "is_end": torch.tensor([True, False, True, True, True, True]),
        "rewards_with_kl": torch.tensor([1.0, 3.0, -2.0, 0.5, 0.25, 4.0]),
        "baseline": torch.tensor([0.2, 0.1, 0.3, 0.5, -0.4, 1.0]),
        "advantages": torch.randn(6, 8, generator=generator),
        "prev_logprobs": model.get_inference_log_probs(tokens) + noise,
    }


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["ppo", "reinforce"])
@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.7, 0), (0.7, 3)])
def test_logprobs_at_the_sampling_temperature(
    kind, tiny_tokenizer_dir, temperature, top_k, warnings
):
    """Those of the whole distribution, with a warning if tokens are drawn from another one."""
    sampling = {"temperature": temperature, "top_k": top_k}
    model = make(kind, tiny_tokenizer_dir, sampling_params=sampling)
    said = [text.startswith("top_k, top_p, repetition_penalty or min_le") for text in warnings]
    assert said == [True] * bool(top_k)
    tokens = batch_of(model)["response_tokens"]
    expected, _ = logprobs_by_hand(model, tokens, temperature)
    close(model.get_inference_log_probs(tokens), expected)
    close(model.get_inference_log_probs(tokens, 3), expected)


def test_other_logprobs_are_the_models_own(tiny_tokenizer_dir):
    """In rejection sampling, whatever the temperature; and after greedy decoding."""
    model = make("rs", tiny_tokenizer_dir, sampling_params={"temperature": 0.7})
    assert model.generation_params.temperature == 0.7
    tokens = batch_of(model)["response_tokens"]
    close(model.get_inference_log_probs(tokens), logprobs_by_hand(model, tokens)[0])
    greedy = {"use_greedy": True, "temperature": 0.7}
    assert make("reinforce", tiny_tokenizer_dir, sampling_params=greedy).temperature == 1.0


def test_a_loss_of_ones_own_gets_what_its_parameters_name(tiny_tokenizer_dir):
    """Whatever the micro-batches; other columns are there for others."""
    actor = make("ppo", tiny_tokenizer_dir)
    batch = batch_of(actor)
    tokens, mask, scores = batch["response_tokens"], batch["mask"], torch.arange(6.0)
    logprobs, entropy = logprobs_by_hand(actor, tokens, 1.0)
    per_token = scores.unsqueeze(1) * logprobs + entropy

    def own(logprobs, entropy, scores, weights):
        loss = (weights * (scores.unsqueeze(1) * logprobs + entropy)).sum()
        return loss, {"loss": loss.detach(), "entropy": (weights * entropy).sum().detach()}

    for reduction in ("token", "sequence"):
        weights = loss_weights(mask, reduction)
        columns = {"tokens": tokens, "scores": scores, "others": scores}
        loss, metrics = actor.compute_loss(own, columns, True, mask=mask, loss_reduction=reduction)
        assert loss == metrics["loss"] == pytest.approx(float((weights * per_token).sum()), 1e-5)
        assert metrics["entropy"] == pytest.approx(float((weights * entropy).sum()), 1e-5)


def losses_of_response(kind, batch, logprobs, row):
    """Losses of its tokens that count, by the formulas of the papers."""
    keep = batch["mask"][row] != 0
    now, advantages = logprobs[row, keep], batch["advantages"][row, keep]
    if kind == "rs":
        return -now
    if not batch["is_end"][row]:
        return now[:0]
    if kind == "reinforce":
        return -(batch["rewards_with_kl"] - batch["baseline"])[row] * now
    ratios = (now - batch["prev_logprobs"][row, keep]).exp()
    return torch.maximum(-advantages * ratios, -advantages * ratios.clamp(0.8, 1.2))


@pytest.mark.parametrize("reduction", ["token", "sequence", "microbatch"])
@pytest.mark.parametrize("kind", CLASSES)
def test_loss_is_that_of_a_naive_loop(kind, tiny_tokenizer_dir, reduction):
    settings = {"loss_reduction": reduction, "entropy_bonus": 0.0}
    model = make(kind, tiny_tokenizer_dir, sampling_params={"temperature": 0.7}, **settings)
    batch = batch_of(model)
    temperature = 1.0 if kind == "rs" else 0.7
    logprobs, _ = logprobs_by_hand(model, batch["response_tokens"], temperature)
    losses = [losses_of_response(kind, batch, logprobs, row) for row in range(6)]
    parts = {"token": [torch.cat(losses)], "sequence": [row for row in losses if len(row)]}
    parts["microbatch"] = [torch.cat(losses[start : start + 2]) for start in (0, 2, 4)]
    means = [part.mean().item() for part in parts[reduction]]
    expected = sum(means) / len(means)
    loss, metrics = model.get_loss_and_metrics(batch, forward_only=True)
    assert loss == metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert kind == "ppo" or set(metrics) == {"loss"}


def test_the_mean_by_a_constant_scales_the_loss_and_leaves_the_metrics(tiny_tokenizer_dir):
    found = {}
    for reduction, size in (("token", 6), ("constant", 6), ("constant", 1)):
        actor = make("ppo", tiny_tokenizer_dir, size, loss_reduction=reduction)
        batch = batch_of(actor)
        found[reduction, size] = actor.get_loss_and_metrics(batch, forward_only=True)
    tokens = (batch["mask"] * batch["is_end"].unsqueeze(-1)).sum().item()
    loss, expected = found["token", 6]
    for size in (6, 1):
        value, metrics = found["constant", size]
        assert value == pytest.approx(loss * tokens / 6 / actor.longest, rel=1e-5)
        means = set(metrics) - {"loss", "scaled_entropy"}
        assert means >= {"ppo_ratio", "approx_kl", "entropy"}
        for name in means:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


def test_settings_of_ppo_arrive_at_the_loss(tiny_tokenizer_dir):
    """Dual clip, KL to the reference in the loss, entropy, truncated responses."""
    settings = {"dual_clip": 1.3, "kl_loss_coef": 0.4, "kl_loss_estimator": "k2"}
    settings |= {"ratio_eps": 0.1, "ratio_eps_high": 0.3, "entropy_bonus": 0.05}
    actor = make("ppo", tiny_tokenizer_dir, train_on_truncated=True, **settings)
    batch = batch_of(actor)
    batch["init_logprobs"] = batch["prev_logprobs"].roll(1, 0)
    logprobs, entropy = logprobs_by_hand(actor, batch["response_tokens"], 1.0)
    names = {"prev_logprobs": "prev_logprobs", "ref_logprobs": "init_logprobs"}
    columns = {name: batch[key] for name, key in names.items()}
    columns |= {"advantages": batch["advantages"], "entropy": entropy}
    weights = loss_weights(batch["mask"])
    expected, metrics = ppo_actor_loss(logprobs=logprobs, **columns, weights=weights, **settings)
    assert metrics["ppo_clip_fraction"] > 0 < metrics["dual_clip_fraction"]
    loss, found = actor.get_loss_and_metrics(batch, forward_only=True)
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    assert found == pytest.approx({k: float(v) for k, v in metrics.items()}, rel=1e-3, abs=1e-6)
    hidden = batch["mask"] == 0
    for key in ("advantages", "prev_logprobs", "init_logprobs"):
        batch[key] = batch[key].masked_fill(hidden, torch.nan)
    assert actor.get_loss_and_metrics(batch, forward_only=True) == (loss, found)


@pytest.mark.parametrize("kind", ["reinforce", "rs"])
def test_nothing_depends_on_padding_or_on_the_micro_batch(kind, tiny_tokenizer_dir):
    """Loss and norm of the gradient; other tokens, rewards and padding where nothing counts."""

    def step(batch, micro_batch_size=2):
        model = make(kind, tiny_tokenizer_dir, micro_batch_size)
        optimizer, scheduler = model.setup_megatron_optimization(max_steps=10)
        model.prepare_for_training_step()
        loss, _ = model.get_loss_and_metrics(batch)
        return loss, optimizer_step(optimizer, scheduler, 1.0)

    batch = batch_of(make(kind, tiny_tokenizer_dir))
    expected = step(batch)
    other, rewards = batch["response_tokens"].clone(), batch["rewards_with_kl"].clone()
    other[0, 7:], other[2, 6:], other[3] = 11, 12, 13
    rewards[[1, 3, 5]] = torch.nan
    pad = torch.nn.functional.pad
    wide = {"response_tokens": pad(other, (0, 6), value=3), "mask": pad(batch["mask"], (0, 6))}
    for changes, size in (({"response_tokens": other, "rewards_with_kl": rewards}, 2), (wide, 1)):
        assert step(batch | changes, size) == pytest.approx(expected, rel=1e-5)
    assert step(batch, 6) == pytest.approx(expected, rel=1e-5)
    if kind == "reinforce":
        assert step(batch | {"is_end": torch.zeros(6, dtype=torch.bool)}) == (0.0, 0.0)


def test_reference_policy_equals_the_policy_until_it_is_trained(tiny_tokenizer_dir):
    actor = make("ppo", tiny_tokenizer_dir)
    with pytest.raises(UserError, match="set_reference_policy"):
        actor.get_init_policy_logprobs(torch.zeros(1, 2, dtype=torch.long))
    actor.set_reference_policy()
    optimizer, scheduler = actor.setup_megatron_optimization(max_steps=10)
    batch = batch_of(actor)
    tokens = batch["response_tokens"]
    before = actor.get_inference_log_probs(tokens)
    assert torch.equal(actor.get_init_policy_logprobs(tokens), before)
    actor.prepare_for_training_step()
    actor.get_loss_and_metrics(batch)
    optimizer_step(optimizer, scheduler, 1.0)
    actor.prepare_for_inference()
    assert torch.equal(actor.get_init_policy_logprobs(tokens), before)
    assert not torch.equal(actor.get_inference_log_probs(tokens), before)


def test_response_without_seeds_depends_on_the_prompt_alone(tiny_tokenizer_dir):
    actor = make("ppo", tiny_tokenizer_dir)
    actor.prepare_for_inference()
    end = actor.tokenizer.eos_id
    prompts = [[1, 2, 3, end, end], [9, 8, 7, 6, 5], [4, 2, 3, end, end]]
    text = torch.tensor([prompt + [end] * 19 for prompt in prompts])
    batch = {"text": text, "length": torch.tensor([3, 5, 3])}
    together = actor.infer(batch)
    for row, total in enumerate(together["response_lengths"].tolist()):
        alone = actor.infer({name: column[row : row + 1] for name, column in batch.items()})
        assert alone["response_lengths"].tolist() == [total]
        tokens = together["response_tokens"][row, :total]
        assert torch.equal(alone["response_tokens"][0, :total], tokens)
    assert set(together) == {"response_tokens", "response_lengths", "prompt_lengths", "is_end"}
