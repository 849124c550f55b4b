# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Dual clip, KL in the loss, clipping metrics: against a loop over Python floats, and its finite
differences.

The loop knows nothing of weights: it forms the named mean over ranks and micro-batches from the
masks alone.
"""

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch

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
EPS, DUAL, COEF, BONUS, VALUE_CLIP = 0.2, 1.7, 0.3, 0.05, 0.4
NAMES = ("logprobs", "prev", "advantages", "ref", "entropy", "values", "prev_values", "returns")


def make(seed=0, rows=12, width=5):
    """Random inputs whose ratios often leave the clip range; rows 4 to 7 and one other count
    nowhere.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, width, generator=generator) > 0.4).float()
    mask[4:8] = 0
    mask[rows - 1] = 0
    return SimpleNamespace(
        mask=mask, **{name: torch.randn(rows, width, generator=generator) for name in NAMES}
    )


def poisoned(b):
    return SimpleNamespace(
        mask=b.mask, **{name: torch.where(b.mask.bool(), getattr(b, name), NAN) for name in NAMES}
    )


def our_loss(kind, b, weights, x, rows=slice(None), estimator="k3", dual_clip=DUAL):
    """(loss, metrics) of some rows; x [N, W] carries the gradient."""
    if kind == "critic":
        others = {"prev_values": b.prev_values[rows], "returns": b.returns[rows]}
        others |= {"weights": weights[rows], "loss_clip_val": VALUE_CLIP}
        return ppo_critic_loss(values=x[rows], **others)
    if kind == "sft":
        return sft_loss(logprobs=x[rows], weights=weights[rows])
    if kind == "regression":
        return regression_loss(predictions=x[rows], labels=b.returns[rows], weights=weights[rows])
    parts = {"logprobs": x[rows], "prev_logprobs": b.prev[rows], "advantages": b.advantages[rows]}
    parts |= {"weights": weights[rows], "ratio_eps": EPS, "dual_clip": dual_clip}
    parts |= {"ref_logprobs": b.ref[rows], "kl_loss_coef": COEF, "kl_loss_estimator": estimator}
    parts |= {"entropy": b.entropy[rows], "entropy_bonus": BONUS}
    return ppo_actor_loss(**parts)


def slot_loss(kind, b, x, row, t, estimator="k3"):
    """Loss of one slot, a Python float."""
    get = {name: getattr(b, name)[row, t].item() for name in NAMES}
    if kind == "critic":
        prev, ret = get["prev_values"], get["returns"]
        clipped = min(max(x, prev - VALUE_CLIP), prev + VALUE_CLIP)
        return 0.5 * max((x - ret) ** 2, (clipped - ret) ** 2)
    if kind == "sft":
        return -x
    if kind == "regression":
        return (x - get["returns"]) ** 2
    rho, advantage = math.exp(x - get["prev"]), get["advantages"]
    # As the papers have it: to maximise.
    objective = min(rho * advantage, min(max(rho, 1 - EPS), 1 + EPS) * advantage)
    if advantage < 0:
        objective = max(objective, DUAL * advantage)
    log_ratio = x - get["ref"]
    kl = {"k1": log_ratio, "abs": abs(log_ratio), "k2": log_ratio**2 / 2}
    kl = (kl | {"k3": math.exp(-log_ratio) - 1 + log_ratio})[estimator]
    return -objective + COEF * kl - BONUS * get["entropy"]


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers) if numbers else 0.0


def naive_loss(kind, b, x, reduction, num_ranks, micro_batch_size, estimator="k3"):
    """x: list of lists. The rows of a rank are consecutive, and so are those of a micro-batch."""
    kept = {row: [t for t in range(len(x[0])) if b.mask[row, t]] for row in range(len(x))}
    loss = lambda row, t: slot_loss(kind, b, x[row][t], row, t, estimator)
    slots = {row: [loss(row, t) for t in columns] for row, columns in kept.items()}
    if reduction == "token":
        return mean(value for values in slots.values() for value in values)
    if reduction == "sequence":
        return mean(mean(values) for values in slots.values() if values)
    per_rank = len(x) // num_ranks
    micro_batches = []
    for rank in range(num_ranks):
        for start in range(rank * per_rank, (rank + 1) * per_rank, micro_batch_size):
            rows = range(start, start + micro_batch_size)
            micro_batches.append(mean(value for row in rows for value in slots[row]))
    return mean(micro_batches)


def loss_and_differences(function, x, h=1e-6):
    """(function(x), its gradient by central differences) for a list of lists x."""
    gradient = torch.zeros(len(x), len(x[0]))
    for row, t in product(range(len(x)), range(len(x[0]))):
        kept = x[row][t]
        x[row][t] = kept + h
        up = function(x)
        x[row][t] = kept - h
        gradient[row, t] = (up - function(x)) / (2 * h)
        x[row][t] = kept
    return function(x), gradient


def distributed_loss(kind, b, reduction, num_ranks, micro_batch_size, estimator="k3"):
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
            rows = slice(first, first + micro_batch_size)
            loss, _ = our_loss(kind, b, weights, x, rows, estimator)
            loss.backward()
            total += loss.item()
        return total, x.grad

    losses, gradients = zip(*run_rank_threads(num_ranks, rank_main), strict=True)
    return sum(losses), torch.stack(gradients).sum(0)


@some_of("reduction", ["token", "sequence", "microbatch"], keep=["microbatch"])
@pytest.mark.parametrize("kind", ["actor", "critic", "sft", "regression"])
def test_loss_and_gradient_of_any_split_are_those_of_the_loop(kind, reduction):
    """With 3 ranks the second has no slot at all, and so have some micro-batches."""
    b = make()
    x = (b.values if kind in ("critic", "regression") else b.logprobs).tolist()
    seen = set()
    for num_ranks, micro_batch_size in ((1, 12), (1, 1), (2, 3), (3, 2), (3, 4), (4, 1)):
        split = (reduction, num_ranks, micro_batch_size)
        loss, gradient = distributed_loss(kind, b, *split)
        expected, differences = loss_and_differences(
            lambda x, split=split: naive_loss(kind, b, x, *split), x
        )
        assert loss == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(gradient, differences, rtol=1e-4, atol=1e-6)
        assert all((gradient[b.mask == 0] == 0).tolist())
        seen.add(round(expected, 6))
        # NaN where nothing counts changes not a bit.
        dirty_loss, dirty_gradient = distributed_loss(kind, poisoned(b), *split)
        assert dirty_loss == loss and torch.equal(dirty_gradient, gradient)
    # 1 and 4 ranks have the same micro-batches of 1.
    assert len(seen) == (1 if reduction != "microbatch" else 5)


@pytest.mark.parametrize("advantage", [2.0, 0.0, -2.0])
def test_a_ratio_beyond_float32_leaves_no_nan(advantage):
    """exp(200) is no float32; clipped slots must still have gradient 0."""
    logprobs = torch.tensor([[0.0]], requires_grad=True)
    given = {"prev_logprobs": torch.tensor([[-200.0]]), "advantages": torch.tensor([[advantage]])}
    options = {"weights": torch.ones(1, 1), "ratio_eps": EPS, "dual_clip": 3.0}
    loss, _ = ppo_actor_loss(logprobs=logprobs, **given, **options)
    loss.backward()
    assert loss.item() == pytest.approx({2.0: -2.4, 0.0: 0.0, -2.0: 6.0}[advantage])
    assert logprobs.grad.item() == 0


def test_metrics_against_a_loop():
    b = make(seed=2)
    _, metrics = our_loss("actor", b, loss_weights(b.mask), b.logprobs)
    _, critic_metrics = our_loss("critic", b, loss_weights(b.mask), b.values)
    clipped, bounded, approx_kl, kl_loss, entropy, value_clipped, count = 0, 0, 0.0, 0.0, 0.0, 0, 0
    ratios = clamped = 0.0
    for row, t in b.mask.nonzero().tolist():
        get = {name: getattr(b, name)[row, t].item() for name in NAMES}
        log_rho = get["logprobs"] - get["prev"]
        rho, advantage = math.exp(log_rho), get["advantages"]
        clipped += (rho > 1 + EPS and advantage > 0) or (rho < 1 - EPS and advantage < 0)
        bounded += advantage < 0 and rho > DUAL
        approx_kl += rho - 1 - log_rho  # the tokens were drawn from the policy of the rollout
        gap = get["logprobs"] - get["ref"]
        kl_loss += math.exp(-gap) - 1 + gap
        entropy += get["entropy"]
        ratios, clamped = ratios + rho, clamped + min(max(rho, 1 - EPS), 1 + EPS)
        moved = get["values"] - get["prev_values"]
        held = get["prev_values"] + math.copysign(VALUE_CLIP, moved)
        value_clipped += abs(moved) > VALUE_CLIP and abs(held - get["returns"]) > abs(
            get["values"] - get["returns"]
        )
        count += 1
    assert 0 < bounded < clipped < count and 0 < value_clipped < count
    for name, expected in [
        ("ppo_ratio", ratios),
        ("ppo_ratio_clamped", clamped),
        ("ppo_clip_fraction", clipped),
        ("dual_clip_fraction", bounded),
        ("approx_kl", approx_kl),
        ("kl_loss", kl_loss),
        ("entropy", entropy),
        ("scaled_entropy", BONUS * entropy),
    ]:
        assert metrics[name].item() == pytest.approx(expected / count, rel=1e-4, abs=1e-6), name
    share = critic_metrics["value_clip_fraction"].item()
    assert share == pytest.approx(value_clipped / count, rel=1e-5)


def test_entropy_is_reported_without_a_bonus_and_has_no_gradient_then():
    entropy = torch.tensor([[0.7, NAN]], requires_grad=True)
    zeros, weights = torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])
    given = {"logprobs": zeros, "prev_logprobs": zeros, "advantages": torch.ones(1, 2)}
    loss, metrics = ppo_actor_loss(**given, weights=weights, ratio_eps=EPS, entropy=entropy)
    assert loss.item() == -1.0
    assert metrics["entropy"].item() == pytest.approx(0.7)
    assert metrics["scaled_entropy"].item() == 0
    assert not loss.requires_grad


def test_what_cannot_be_is_refused():
    b = make()
    weights = loss_weights(b.mask)
    unknown = "KL estimator 'k4' is unknown; choose one of k1, abs, k2, k3"
    with pytest.raises(ValueError, match=unknown):
        our_loss("actor", b, weights, b.logprobs, estimator="k4")
    with pytest.raises(AssertionError, match="kl_loss_coef=0.1 needs ref_logprobs"):
        given = {"logprobs": b.logprobs, "prev_logprobs": b.prev, "advantages": b.advantages}
        ppo_actor_loss(**given, weights=weights, ratio_eps=EPS, kl_loss_coef=0.1)
