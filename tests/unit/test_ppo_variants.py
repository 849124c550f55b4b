# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses of policies, values, likelihoods and labels, with their gradients and metrics, against
the papers' formulas in float64, response by response.

The formulas know nothing of masks, weights and ranks: the named mean over ranks and micro-batches
is formed from the responses alone.
"""

from types import SimpleNamespace

import pytest
import torch

from nemo_aligner.core.estimators import POLICY_LOSSES
from nemo_aligner.core.losses import (
    loss_weights,
    ppo_actor_loss,
    ppo_critic_loss,
    regression_loss,
    sft_loss,
)
from tests.cases import some_of
from tests.rank_threads import run_rank_threads

NAN = float("nan")
LOW, HIGH, DUAL, COEF, BONUS, VALUE_CLIP = 0.15, 0.25, 1.7, 0.3, 0.05, 0.4
NAMES = ("logprobs", "prev", "advantages", "ref", "entropy", "values", "prev_values", "returns")
CLIPS = {"ratio_eps": LOW, "ratio_eps_high": HIGH}


def make(seed=0, rows=12, width=5):
    """Random inputs whose ratios often leave the clip range; rows 4 to 7 and one other count
    nowhere.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, width, generator=generator) > 0.4).float()
    mask[4:8] = 0
    mask[rows - 1] = 0
    columns = {name: torch.randn(rows, width, generator=generator) for name in NAMES}
    return SimpleNamespace(mask=mask, **columns)


def poisoned(b):
    columns = {name: torch.where(b.mask.bool(), getattr(b, name), NAN) for name in NAMES}
    return SimpleNamespace(mask=b.mask, **columns)


def our_loss(kind, b, weights, x, rows=slice(None), **options):
    """(loss, metrics) of some rows; x [N, W] carries the gradient."""
    own = {"weights": weights[rows]}
    if kind == "critic":
        others = {"prev_values": b.prev_values[rows], "returns": b.returns[rows]}
        return ppo_critic_loss(values=x[rows], loss_clip_val=VALUE_CLIP, **others, **own)
    if kind == "sft":
        return sft_loss(logprobs=x[rows], **own)
    if kind == "regression":
        return regression_loss(predictions=x[rows], labels=b.returns[rows], **own)
    own |= {"logprobs": x[rows], "prev_logprobs": b.prev[rows], "advantages": b.advantages[rows]}
    own |= CLIPS
    if kind != "actor":
        return ppo_actor_loss(**own, policy_loss=kind)
    own |= {"ref_logprobs": b.ref[rows], "kl_loss_coef": COEF, "dual_clip": DUAL}
    own |= {"entropy": b.entropy[rows], "entropy_bonus": BONUS}
    return ppo_actor_loss(**own | options)


def losses_of_response(kind, b, x, row):
    """Of its tokens that count, or the one of all of them; x: float64."""
    columns = b.mask[row].nonzero().flatten()
    get = SimpleNamespace(**{name: getattr(b, name)[row, columns].double() for name in NAMES})
    now = x[row, columns]
    if kind == "critic":
        clipped = now.clamp(get.prev_values - VALUE_CLIP, get.prev_values + VALUE_CLIP)
        return 0.5 * torch.maximum((now - get.returns) ** 2, (clipped - get.returns) ** 2)
    if kind == "sft":
        return -now
    if kind == "regression":
        return (now - get.returns) ** 2
    # As the papers have it: to maximise.
    a, ratios, clip = get.advantages, (now - get.prev).exp(), (1 - LOW, 1 + HIGH)
    if kind == "gspo":
        ratios = ratios.prod() ** (1 / max(len(columns), 1))
    objective = torch.minimum(ratios * a, ratios.clamp(*clip) * a)
    if kind == "cispo":
        objective = ratios.detach().clamp(*clip) * a * now
    if kind == "sapo":
        tau = torch.where(a > 0, 1.0, 1.05)
        objective = 4 / tau / (1 + torch.exp(-tau * (ratios - 1))) * a
    if kind == "gmpo":  # the geometric mean of |min(r A, clip(r) A)|, with the sign of A
        low, high = torch.tensor([-LOW, HIGH]).double().exp()
        bounded = torch.minimum(ratios * a, ratios.clamp(low, high) * a).abs()
        objective = bounded.prod() ** (1 / max(len(columns), 1)) * a.sign()
    if kind != "actor":
        return -objective
    objective = torch.where(a < 0, objective.maximum(DUAL * a), objective)
    log_ratio = now - get.ref
    return -objective + COEF * ((-log_ratio).exp() - 1 + log_ratio) - BONUS * get.entropy


def mean(numbers):
    return sum(numbers) / len(numbers) if len(numbers) else 0.0


def naive_loss(kind, b, x, reduction, micro_batch_size):
    """Loss and gradient; the rows of a micro-batch are consecutive."""
    x = x.double().requires_grad_()
    responses = [losses_of_response(kind, b, x, row) for row in range(len(x))]
    if reduction == "token":
        loss = mean(torch.cat(responses))
    elif reduction == "sequence":
        loss = mean([mean(losses) for losses in responses if len(losses)])
    else:
        starts = range(0, len(x), micro_batch_size)
        parts = [torch.cat(responses[start : start + micro_batch_size]) for start in starts]
        loss = mean([mean(losses) for losses in parts])
    return loss.item(), *torch.autograd.grad(loss, x)


def distributed_loss(kind, b, reduction, num_ranks, micro_batch_size):
    """(loss, gradient [N, W]) summed over ranks and micro-batches, each rank with its own share of
    the rows.
    """
    values = b.values if kind in ("critic", "regression") else b.logprobs
    per_rank = len(b.mask) // num_ranks

    def rank_main(rank, sum_over_ranks):
        start = rank * per_rank
        weights = torch.zeros_like(b.mask)
        share = slice(start, start + per_rank)
        weights[share] = loss_weights(b.mask[share], reduction, micro_batch_size, sum_over_ranks)
        x = values.clone().requires_grad_()
        total = 0.0
        for first in range(start, start + per_rank, micro_batch_size):
            loss, _ = our_loss(kind, b, weights, x, slice(first, first + micro_batch_size))
            loss.backward()
            total += loss.item()
        return total, x.grad

    losses, gradients = zip(*run_rank_threads(num_ranks, rank_main), strict=True)
    return sum(losses), torch.stack(gradients).sum(0)


def check_all_splits(kind, b, reduction):
    """With 3 ranks the second has no slot at all, and so have some micro-batches."""
    values = b.values if kind in ("critic", "regression") else b.logprobs
    seen = set()
    for num_ranks, micro_batch_size in ((1, 12), (1, 1), (2, 3), (3, 2), (3, 4), (4, 1)):
        split = (reduction, num_ranks, micro_batch_size)
        loss, gradient = distributed_loss(kind, b, *split)
        expected, slope = naive_loss(kind, b, values, reduction, micro_batch_size)
        assert loss == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(gradient.double(), slope, rtol=1e-4, atol=1e-6)
        assert not gradient[b.mask == 0].any()
        seen.add(round(expected, 6))
        # NaN where nothing counts changes not a bit.
        dirty_loss, dirty_gradient = distributed_loss(kind, poisoned(b), *split)
        assert dirty_loss == loss and torch.equal(dirty_gradient, gradient)
    # 1 and 4 ranks have the same micro-batches of 1.
    assert len(seen) == (1 if reduction != "microbatch" else 5)


@some_of("reduction", ["token", "sequence", "microbatch"], keep=["microbatch"])
@pytest.mark.parametrize("kind", ["actor", "critic", "sft", "regression"])
def test_loss_and_gradient_of_any_split_are_those_of_the_loop(kind, reduction):
    check_all_splits(kind, make(), reduction)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_loss_and_gradient_are_those_of_the_paper(name):
    """Every response has one advantage."""
    b = make(seed=10)
    b.advantages = b.advantages[:, :1].expand_as(b.mask)
    check_all_splits(name, b, "sequence")
    _, metrics = our_loss(name, b, loss_weights(b.mask, "sequence"), b.logprobs)
    assert (metrics["ppo_clip_fraction"] > 0) == (name in ("clip", "gspo", "gmpo"))


def test_the_mean_by_a_constant_does_not_know_the_length():
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    weights = loss_weights(mask, "constant", longest=10)
    torch.testing.assert_close(weights, mask / 3 / 10)
    with pytest.raises(ValueError, match="longest=None"):
        loss_weights(mask, "constant")


@pytest.mark.parametrize("advantage", [2.0, 0.0, -2.0])
def test_a_ratio_beyond_float32_leaves_no_nan(advantage):
    """exp(200) is no float32; clipped slots must still have gradient 0."""
    logprobs = torch.tensor([[0.0]], requires_grad=True)
    given = {"prev_logprobs": torch.tensor([[-200.0]]), "advantages": torch.tensor([[advantage]])}
    options = {"weights": torch.ones(1, 1), "ratio_eps": 0.2, "dual_clip": 3.0}
    loss, _ = ppo_actor_loss(logprobs=logprobs, **given, **options)
    loss.backward()
    assert loss.item() == pytest.approx({2.0: -2.4, 0.0: 0.0, -2.0: 6.0}[advantage])
    assert logprobs.grad.item() == 0


def test_metrics_against_a_loop():
    b = make(seed=2)
    _, metrics = our_loss("actor", b, loss_weights(b.mask), b.logprobs)
    metrics |= our_loss("critic", b, loss_weights(b.mask), b.values)[1]
    every = []
    for row, t in b.mask.nonzero().tolist():
        get = SimpleNamespace(**{name: getattr(b, name)[row, t].double() for name in NAMES})
        log_rho, gap = get.logprobs - get.prev, get.logprobs - get.ref
        rho, moved = log_rho.exp(), get.values - get.prev_values
        held = get.prev_values + moved.clamp(-VALUE_CLIP, VALUE_CLIP)
        beyond = rho > 1 + HIGH if get.advantages > 0 else rho < 1 - LOW
        found = {"ppo_ratio": rho, "ppo_ratio_clamped": rho.clamp(1 - LOW, 1 + HIGH)}
        found |= {"ppo_clip_fraction": beyond}
        found |= {"dual_clip_fraction": get.advantages < 0 and rho > DUAL}
        # The tokens were drawn from the policy of the rollout.
        found |= {"approx_kl": rho - 1 - log_rho, "kl_loss": (-gap).exp() - 1 + gap}
        found |= {"entropy": get.entropy, "scaled_entropy": BONUS * get.entropy}
        is_further = abs(held - get.returns) > abs(get.values - get.returns)
        found["value_clip_fraction"] = abs(moved) > VALUE_CLIP and is_further
        every.append({name: float(value) for name, value in found.items()})
    expected = {name: mean([found[name] for found in every]) for name in every[0]}
    assert 0 < expected["dual_clip_fraction"] < expected["ppo_clip_fraction"] < 1
    assert 0 < expected["value_clip_fraction"] < 1
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_entropy_is_reported_without_a_bonus_and_has_no_gradient_then():
    entropy = torch.tensor([[0.7, NAN]], requires_grad=True)
    zeros, weights = torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])
    given = {"logprobs": zeros, "prev_logprobs": zeros, "advantages": torch.ones(1, 2)}
    loss, metrics = ppo_actor_loss(**given, weights=weights, **CLIPS, entropy=entropy)
    assert loss.item() == -1.0
    assert metrics["entropy"].item() == pytest.approx(0.7)
    assert metrics["scaled_entropy"].item() == 0
    assert not loss.requires_grad


def test_what_cannot_be_is_refused():
    b = make()
    weights = loss_weights(b.mask)
    for options, words in (
        ({"dual_clip": 1.0}, "dual_clip=1.0 must be above 1"),
        ({"kl_loss_estimator": "k4"}, "estimator 'k4' is unknown; choose one of k1, abs, k2, k3"),
        ({"ref_logprobs": None}, "kl_loss_coef=0.3 needs the log-probs of the reference"),
    ):
        with pytest.raises(ValueError, match=words):
            our_loss("actor", b, weights, b.logprobs, **options)
