# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses against naive loops (other libraries: test_oracle_losses.py); any split; NaN in slots
that do not count.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from nemo_aligner.core.losses import (
    loss_weights,
    ppo_actor_loss,
    ppo_critic_loss,
    preference_loss,
    regression_loss,
    sft_loss,
)

NAN = float("nan")


def batch(seed=0, rows=6, width=7):
    """Random inputs [rows, width] for both PPO losses; sample 2 counts nowhere."""
    torch.manual_seed(seed)
    mask = (torch.rand(rows, width) > 0.4).float()
    mask[2] = 0
    names = [
        "logprobs",
        "prev_logprobs",
        "advantages",
        "entropy",
        "values",
        "prev_values",
        "returns",
    ]
    return SimpleNamespace(mask=mask, **{name: torch.randn(rows, width) for name in names})


def actor(b, weights, rows=slice(None), bonus=0.01, logprobs=None):
    return ppo_actor_loss(
        logprobs=(b.logprobs if logprobs is None else logprobs)[rows],
        prev_logprobs=b.prev_logprobs[rows],
        advantages=b.advantages[rows],
        weights=weights[rows],
        ratio_eps=0.2,
        entropy=b.entropy[rows],
        entropy_bonus=bonus,
    )


def critic(b, weights, rows=slice(None), clip=0.2, values=None):
    return ppo_critic_loss(
        values=(b.values if values is None else values)[rows],
        prev_values=b.prev_values[rows],
        returns=b.returns[rows],
        weights=weights[rows],
        loss_clip_val=clip,
    )


def test_weights_by_hand():
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    t, h, q = 1 / 6, 1 / 2, 1 / 3
    close(loss_weights(mask, "token"), [[t, t, 0, 0], [0, t, t, t], [0, 0, 0, 0], [t, 0, 0, 0]])
    close(
        loss_weights(mask, "sequence"),
        [[q * h, q * h, 0, 0], [0, q * q, q * q, q * q], [0] * 4, [q, 0, 0, 0]],
    )
    a = 1 / 5 / 2  # two micro-batches of 5 and 1 counting slots
    close(loss_weights(mask, "microbatch", 2), [[a, a, 0, 0], [0, a, a, a], [0] * 4, [h, 0, 0, 0]])


def close(actual, expected):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), atol=1e-7, rtol=1e-6
    )


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_weights_over_ranks_equal_those_of_the_whole(reduction):
    mask = batch().mask
    shares = [mask[:2], mask[2:]]
    sums = {  # what all ranks together would send to the collective
        "token": mask.sum(),
        "sequence": mask.any(1).sum(),
    }
    parts = [
        loss_weights(share, reduction, sum_over_dp=lambda _: sums[reduction].double())
        for share in shares
    ]
    torch.testing.assert_close(torch.cat(parts), loss_weights(mask, reduction))
    assert loss_weights(mask, reduction).sum().item() == pytest.approx(1.0)


def test_weights_of_microbatches_over_ranks():
    mask = torch.ones(4, 3)
    weights = loss_weights(mask, "microbatch", 2, sum_over_dp=lambda x: 3 * x)
    assert weights.sum().item() == pytest.approx(1 / 3)  # of three ranks


@pytest.mark.parametrize("reduction", ["token", "sequence", "microbatch"])
def test_empty_mask_gives_zero_loss_and_gradient(reduction):
    b = batch()
    weights = loss_weights(torch.zeros_like(b.mask), reduction, 2)
    logprobs = torch.full_like(b.logprobs, NAN, requires_grad=True)
    loss, metrics = actor(b, weights, logprobs=logprobs)
    loss.backward()
    assert loss.item() == 0 and logprobs.grad.abs().sum() == 0
    assert all(metric.item() == 0 for metric in metrics.values())


def test_weights_refuse_what_cannot_be():
    with pytest.raises(
        ValueError,
        match="loss_reduction='mean' is unknown; choose one of token, sequence, microbatch",
    ):
        loss_weights(torch.ones(2, 2), "mean")
    with pytest.raises(ValueError, match="micro_batch_size=2 does not divide the 3 samples"):
        loss_weights(torch.ones(3, 2), "microbatch", 2)


def test_counts_travel_in_a_type_that_holds_them():
    """2**24 + 1 tokens over all ranks: float32 would lose the last one."""

    def sum_over_dp(count):
        assert (count + 2**24).item() == 2**24 + 1
        return count

    for reduction in ("token", "sequence", "microbatch"):
        loss_weights(torch.ones(1, 1), reduction, 1, sum_over_dp=sum_over_dp)


def test_actor_loss_against_a_naive_loop():
    b = batch()
    expected = ratios = clamped_ratios = entropy = count = 0.0
    for row in range(b.mask.shape[0]):
        for t in range(b.mask.shape[1]):
            if b.mask[row, t]:
                rho = math.exp(b.logprobs[row, t].item() - b.prev_logprobs[row, t].item())
                rho_c = min(max(rho, 0.8), 1.2)
                advantage = b.advantages[row, t].item()
                expected += max(-advantage * rho, -advantage * rho_c)
                ratios, clamped_ratios = ratios + rho, clamped_ratios + rho_c
                entropy, count = entropy + b.entropy[row, t].item(), count + 1
    loss, metrics = actor(b, loss_weights(b.mask), bonus=0.5)
    assert loss.item() == pytest.approx((expected - 0.5 * entropy) / count, abs=1e-5)
    assert metrics["loss"].item() == loss.item()
    assert metrics["ppo_ratio"].item() == pytest.approx(ratios / count, abs=1e-5)
    assert metrics["ppo_ratio_clamped"].item() == pytest.approx(clamped_ratios / count, abs=1e-5)
    assert metrics["scaled_entropy"].item() == pytest.approx(0.5 * entropy / count, abs=1e-5)


def test_critic_loss_by_hand():
    def loss(value, prev, ret, clip):
        args = {"values": value, "prev_values": prev, "returns": ret}
        args = {name: torch.tensor([[x]]) for name, x in args.items()}
        return ppo_critic_loss(**args, weights=torch.ones(1, 1), loss_clip_val=clip)[0].item()

    assert loss(2.0, 1.0, 2.0, 0.5) == pytest.approx(
        0.5 * 0.5**2
    )  # held at 1.5 although 2.0 would be right
    assert loss(2.0, 1.0, 1.4, 0.5) == pytest.approx(0.5 * 0.6**2)  # the worse of 1.5 and 2.0
    for off in (None, 0, -1):
        assert loss(2.0, 1.0, 3.0, off) == pytest.approx(0.5)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("sizes", [[6], [3, 3], [1, 2, 3], [1] * 6])
def test_any_split_gives_the_same_loss_metrics_and_gradient(reduction, sizes):
    b = batch(seed=4)
    weights = loss_weights(b.mask, reduction)
    whole, split = (b.logprobs.clone().requires_grad_() for _ in range(2))
    loss, metrics = actor(b, weights, logprobs=whole)
    loss.backward()
    sums = {}
    for rows in torch.arange(6).split(sizes):
        part, part_metrics = actor(b, weights, rows, logprobs=split)
        part.backward()
        for name, value in part_metrics.items():
            sums[name] = sums.get(name, 0) + value
    torch.testing.assert_close(split.grad, whole.grad)
    for name in metrics:
        torch.testing.assert_close(sums[name], metrics[name])


def test_nan_where_the_weight_is_zero_changes_nothing():
    b = batch(seed=5)
    planted = SimpleNamespace(
        mask=b.mask,
        **{k: torch.where(b.mask.bool(), v, NAN) for k, v in vars(b).items() if k != "mask"},
    )
    weights = loss_weights(b.mask)

    def results(b):
        logprobs, values = b.logprobs.clone().requires_grad_(), b.values.clone().requires_grad_()
        entropy = b.entropy.clone().requires_grad_()
        actor_loss, actor_metrics = actor(
            SimpleNamespace(**{**vars(b), "entropy": entropy}), weights, logprobs=logprobs
        )
        critic_loss, critic_metrics = critic(b, weights, values=values)
        nll, _ = sft_loss(logprobs=logprobs, weights=weights)
        (actor_loss + critic_loss + nll).backward()
        losses = [actor_loss, critic_loss, nll, *actor_metrics.values(), *critic_metrics.values()]
        return [*losses, logprobs.grad, values.grad, entropy.grad]

    for clean, dirty in zip(results(b), results(planted)):
        assert torch.equal(clean, dirty)


def test_sft_loss_against_cross_entropy():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 11), torch.randint(0, 11, (3, 5))
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 0]])
    logprobs = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    loss, _ = sft_loss(logprobs=logprobs, weights=loss_weights(mask))
    ignored = labels.masked_fill(mask == 0, -100)
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(logits.transpose(1, 2), ignored)
    )


def test_preference_loss_by_hand():
    chosen = torch.tensor([[2.0], [0.0], [1.0], [NAN]], requires_grad=True)
    rejected = torch.tensor([0.5, 1.0, 1.0, 3.0])
    loss, metrics = preference_loss(
        rewards_chosen=chosen,
        rewards_rejected=rejected,
        weights=loss_weights(torch.tensor([1, 1, 1, 0])),
    )
    loss.backward()
    softplus = [math.log1p(math.exp(-margin)) for margin in (1.5, -1.0, 0.0)]
    assert loss.item() == pytest.approx(sum(softplus) / 3, abs=1e-6)
    assert metrics["acc"].item() == pytest.approx(1 / 3)
    expected = [-1 / (1 + math.exp(margin)) / 3 for margin in (1.5, -1.0, 0.0)] + [0.0]
    assert chosen.grad.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_regression_loss_by_hand():
    """Three samples, two attributes; two labels are missing."""
    predictions = torch.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, NAN]], requires_grad=True)
    labels = torch.tensor([[2.0, -100.0], [0.0, 1.0], [1.0, NAN]])
    mask = torch.tensor([[1, 0], [1, 1], [1, 0]])
    loss, metrics = regression_loss(
        predictions=predictions, labels=labels, weights=loss_weights(mask)
    )
    assert loss.item() == metrics["loss"].item() == pytest.approx((1.0 + 0.25 + 4.0 + 4.0) / 4)
    loss.backward()
    close(predictions.grad, [[-0.5, 0.0], [0.25, -1.0], [1.0, 0.0]])  # 2 (x - y) / 4


def test_regression_loss_does_not_broadcast():
    weights = torch.full((2, 3), 1 / 6)
    for predictions, labels in (((2, 1), (2, 3)), ((2, 3), (2, 1)), ((2,), (2, 3))):
        with pytest.raises(ValueError, match="they must be equal"):
            regression_loss(
                predictions=torch.ones(predictions), labels=torch.ones(labels), weights=weights
            )


def test_entropy_bonus_without_entropy_is_refused():
    b = batch()
    b.entropy = None
    with pytest.raises(ValueError, match="entropy_bonus=0.5 needs the entropy"):
        ppo_actor_loss(
            logprobs=b.logprobs,
            prev_logprobs=b.prev_logprobs,
            advantages=b.advantages,
            weights=loss_weights(b.mask),
            ratio_eps=0.2,
            entropy_bonus=0.5,
        )
