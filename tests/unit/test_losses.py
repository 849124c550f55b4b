# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of losses by hand, and losses of any split. Naive loops: test_ppo_variants.py; other
libraries: test_oracle_losses.py; NaN in slots that do not count: test_masked_slots.py.
"""

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


def batch(seed=0, rows=6, width=7):
    """Random inputs [rows, width] of the actor's loss; sample 2 counts nowhere."""
    torch.manual_seed(seed)
    mask = (torch.rand(rows, width) > 0.4).float()
    mask[2] = 0
    names = ["logprobs", "prev_logprobs", "advantages", "entropy"]
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
