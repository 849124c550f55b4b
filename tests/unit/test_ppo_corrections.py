# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Corrections for a sampler that is not the trainer, Clip-Cov and KL-Cov: loops over the papers'
formulas, and runs of a trainer among fakes."""

import math
from functools import partial

import pytest
import torch
from omegaconf import OmegaConf

from nemo_aligner.algorithms.ppo_data import correct_for_sampler, treat_covariant_tokens
from nemo_aligner.core.kl import chosen_tokens, correction_factors, covariances
from nemo_aligner.core.losses import ppo_actor_loss
from tests.ppo_fakes import make_trainer

ROWS, COLUMNS = 6, 7
MASK = torch.tensor([[0, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0, 0], [0] * 7] * 2).float()
TOKENS = torch.arange(ROWS * (COLUMNS + 1)).view(ROWS, -1)
LEVELS = ("token", "sequence", "geometric")


def sampler_correction(*values):
    return OmegaConf.create(dict(zip(("weights", "cap", "reject", "low", "high"), values)))


def noise(seed, scale=0.6):
    return scale * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def naive_ratio(log_ratio, row, column, level):
    values = [math.exp(float(log_ratio[row, t])) for t in range(COLUMNS) if MASK[row, t]]
    if level == "token":
        return math.exp(float(log_ratio[row, column]))
    return math.prod(values) ** (1 if level == "sequence" else 1 / len(values))


@pytest.mark.parametrize("weights", [None, *LEVELS])
@pytest.mark.parametrize("reject", [None, *LEVELS])
def test_factors_and_metrics_are_those_of_a_loop(weights, reject):
    settings = sampler_correction(weights, 1.5, reject, 0.6, 1.8)
    sampler, trainer = noise(1), noise(2)
    log_ratio = torch.where(MASK != 0, trainer - sampler, 0)
    factors, _ = correction_factors(log_ratio, MASK, **settings)
    outside = torch.where(MASK != 0, 0.0, torch.nan)
    batch = {"logprobs": trainer + outside, "sampling_logprobs": sampler}
    corrected, metrics = correct_for_sampler(torch.ones_like(MASK), batch, MASK, settings)
    every = []
    for row, column in MASK.nonzero().tolist():
        ratio = partial(naive_ratio, log_ratio, row, column)
        expected = min(ratio(weights), 1.5) if weights else 1.0
        expected *= reject is None or 0.6 <= ratio(reject) <= 1.8
        assert factors[row, column] == pytest.approx(expected, rel=1e-5)
        assert corrected[row, column] == factors[row, column]
        every.append(ratio(weights or reject or "token"))
    assert metrics["sampler_weight_mean"] == pytest.approx(sum(every) / len(every), rel=1e-5)
    assert metrics["sampler_weight_max"] == pytest.approx(max(every), rel=1e-5)
    squares = sum(x * x for x in every) * len(every)
    wanted = pytest.approx(sum(every) ** 2 / squares, rel=1e-5)
    assert metrics["sampler_effective_samples"] == wanted
    assert metrics["sampler_kl"] > 0 and metrics["sampler_kl_reverse"] > 0


def test_ratios_beyond_a_float32_and_no_token_at_all_are_no_error():
    far = torch.full_like(MASK, -30.0) * MASK
    settings = sampler_correction("sequence", 2.0, None, 0.5, 2.0)
    for log_ratio, mask in ((far, MASK), (-far, MASK), (far, 0 * MASK)):
        batch = {"logprobs": log_ratio, "sampling_logprobs": torch.zeros_like(MASK)}
        corrected, metrics = correct_for_sampler(MASK, batch, mask, settings)
        assert corrected.isfinite().all() and 0 <= metrics["sampler_effective_samples"] <= 1


def test_kls_are_those_of_the_two_distributions():
    """Of one token of three, counted as often as the sampler draws it."""
    sampler, trainer = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    drawn = sampler.mul(1000).round().int().tolist()
    tokens = torch.tensor([t for t in range(3) for _ in range(drawn[t])])[:, None]
    batch = {"logprobs": trainer.log()[tokens], "sampling_logprobs": sampler.log()[tokens]}
    settings = sampler_correction("token", 9.0, None, 0.0, 9.0)
    values = tokens.float()  # the mean of a quantity under the trainer, from the sampler's tokens
    corrected, metrics = correct_for_sampler(values, batch, torch.ones_like(values), settings)
    assert corrected.mean() == pytest.approx(float(trainer @ torch.arange(3.0)), rel=1e-5)
    forward = float((sampler * (sampler / trainer).log()).sum())
    reverse = float((trainer * (trainer / sampler).log()).sum())
    assert metrics["sampler_kl"] == pytest.approx(forward, rel=1e-4)
    assert metrics["sampler_kl_reverse"] == pytest.approx(reverse, rel=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_a_sampler_that_is_the_trainer_changes_no_bit(level):
    correction = {"weights": level, "cap": 1.0, "reject": level, "low": 0.9999, "high": 1.0001}
    settings = dict(max_steps=2, advantage_estimator="grpo", num_rollouts_per_prompt=2)
    plain = make_trainer(**settings)
    corrected = make_trainer(**settings, sampler_correction=correction)
    corrected.model.sampler_offset = -3e-5  # the rounding of its float32
    for trainer in (plain, corrected):
        trainer.fit()
    assert corrected.model.weight == plain.model.weight != 0
    for one, other in zip(plain.model.batches, corrected.model.batches, strict=True):
        torch.testing.assert_close(one["advantages"], other["advantages"], rtol=0, atol=0)
    assert corrected.logger.series("train_rollouts/sampler_rejected") == [(0, 0.0), (1, 0.0)]


def test_covariant_tokens_are_those_of_a_loop():
    logprobs, advantages = noise(3), noise(4)
    slots = [*map(tuple, MASK.nonzero().tolist())]
    mean = [sum(float(x[s]) for s in slots) / len(slots) for x in (logprobs, advantages)]
    naive = {s: (float(logprobs[s]) - mean[0]) * (float(advantages[s]) - mean[1]) for s in slots}
    found = covariances(logprobs, advantages, MASK)
    assert all(float(found[s]) == pytest.approx(naive[s], rel=1e-5) for s in slots)

    def chosen(new_rollout=0, **changes):
        values = {"rule": "kl", "fraction": 0.25, "low": 0.0, "high": 0.2} | changes
        got = chosen_tokens(logprobs, advantages, MASK, TOKENS + new_rollout, **values)
        return {tuple(slot) for slot in got.nonzero().tolist()}

    largest = sorted(slots, key=naive.get)[-4:]  # a quarter of 16
    assert chosen() == set(largest)
    assert chosen(fraction=0.001) == {largest[-1]}
    inside = {s for s in slots if 0 <= naive[s] <= 0.2}
    drawn = chosen(rule="clip")
    assert len(drawn) == 4 < len(inside) and drawn < inside
    assert any(chosen(rule="clip", new_rollout=1 + i) != drawn for i in range(3))
    assert chosen(rule="clip", fraction=1.0) == inside
    assert chosen(rule="clip", low=7.0, high=8.0) == set()


def test_chosen_tokens_lose_their_gradient_or_get_a_kl():
    logprobs, advantages, prev = noise(3).requires_grad_(), noise(4), noise(5)
    ends = torch.tensor([True, True, True, True, False, True])
    batch = {"sample_order": torch.arange(ROWS), "response_tokens": TOKENS, "is_end": ends}
    weights = MASK / MASK.sum()

    def loss(rule):
        settings = {"rule": rule, "fraction": 0.25, "low": 0.0, "high": 0.2, "kl_coef": 0.5}
        settings = OmegaConf.create(settings)
        treated, metrics = treat_covariant_tokens(advantages, prev, batch, MASK, settings)
        assert metrics == {"fraction_of_covariant_tokens": pytest.approx(3 / 13)}
        order = torch.tensor([3, 0, 5, 1, 4, 2])  # as ranks might hold the samples
        mixed = {key: column[order] for key, column in batch.items()}
        arguments = (advantages[order], prev[order], mixed, MASK[order], settings)
        elsewhere, _ = treat_covariant_tokens(*arguments)
        for name, column in treated.items():
            assert torch.equal(column[order], elsewhere[name])
        total, _ = ppo_actor_loss(
            logprobs=logprobs, prev_logprobs=prev, weights=weights, ratio_eps=9.0, **treated
        )
        return total, torch.autograd.grad(total, logprobs)[0], treated

    total, gradient, treated = loss("clip")
    lost = (MASK != 0) & (gradient == 0)
    assert torch.equal(lost, (MASK != 0) & (treated["advantages"] == 0)) and int(lost.sum()) == 3
    assert not lost[4].any()  # of a response that was cut off
    total, _, treated = loss("kl")
    own = lambda s: -float(advantages[s]) * math.exp(float(logprobs[s] - prev[s]))
    kl = lambda s: float(treated["old_kl_coefs"][s]) * abs(float(logprobs[s] - prev[s]))
    naive = sum(own(s) + kl(s) for s in map(tuple, MASK.nonzero().tolist()))
    assert float(total) == pytest.approx(naive / int(MASK.sum()), rel=1e-5)
    assert sorted(treated["old_kl_coefs"][MASK != 0].unique().tolist()) == [0.0, 0.5]
