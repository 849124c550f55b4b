# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses in place of PPO's clipped one, against loops over Python floats that follow the papers
response by response, and their finite differences.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from nemo_aligner.core.estimators import POLICY_LOSSES
from nemo_aligner.core.losses import loss_weights, ppo_actor_loss

LOW, HIGH = 0.15, 0.25
NAN = float("nan")
ROWS, WIDTH = 6, 5


@pytest.fixture
def batch():
    """Six responses, one without a token that counts; every response has one advantage."""
    generator = torch.Generator().manual_seed(3)
    mask = (torch.rand(ROWS, WIDTH, generator=generator) > 0.3).float()
    mask[4] = 0
    prev = torch.randn(ROWS, WIDTH, generator=generator)
    return SimpleNamespace(
        mask=mask,
        prev=prev,
        logprobs=prev + 0.6 * torch.randn(ROWS, WIDTH, generator=generator),
        advantages=torch.tensor([1.5, -0.7, 0.4, 2.0, 1.0, -0.9])[:, None].expand(ROWS, WIDTH),
    )


def ours(name, b, logprobs, rows=slice(None), reduction="sequence", **options):
    weights = loss_weights(b.mask, reduction)
    given = {"logprobs": logprobs[rows], "prev_logprobs": b.prev[rows]}
    given |= {"advantages": b.advantages[rows], "weights": weights[rows], "ratio_eps": LOW}
    given |= {"ratio_eps_high": HIGH, "policy_loss": name, **options}
    return ppo_actor_loss(**given)


def clip(value, low=1 - LOW, high=1 + HIGH):
    return min(max(value, low), high)


def mean(numbers):
    return sum(numbers) / len(numbers)


def of_response(name, now, before, frozen, advantage):
    """What a paper maximises for one response; `frozen`: log-probs behind a stop-gradient."""
    ratios = [math.exp(a - b) for a, b in zip(now, before, strict=True)]
    if name == "clip":
        return mean([min(r * advantage, clip(r) * advantage) for r in ratios])
    if name == "gspo":
        whole = math.exp(mean([a - b for a, b in zip(now, before, strict=True)]))
        return min(whole * advantage, clip(whole) * advantage)
    if name == "cispo":
        stopped = [math.exp(a - b) for a, b in zip(frozen, before, strict=True)]
        return mean([clip(s) * advantage * x for s, x in zip(stopped, now, strict=True)])
    if name == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return mean([4 / tau / (1 + math.exp(-tau * (r - 1))) * advantage for r in ratios])
    # GMPO: the geometric mean of |min(r A, clip(r) A)|, with the sign of A
    low, high = math.exp(-LOW), math.exp(HIGH)
    bounded = [abs(min(r * advantage, clip(r, low, high) * advantage)) for r in ratios]
    return math.prod(bounded) ** (1 / len(bounded)) * (1 if advantage > 0 else -1)


def expected(name, b, logprobs):
    """The loss, a Python float, of log-probs in lists."""
    found = []
    for row in range(ROWS):
        keep = [t for t in range(WIDTH) if b.mask[row, t]]
        if keep:
            rows = logprobs[row], b.prev[row].tolist(), b.logprobs[row].tolist()
            columns = ([numbers[t] for t in keep] for numbers in rows)
            found.append(of_response(name, *columns, b.advantages[row, 0].item()))
    return -mean(found)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_loss_and_gradient_are_those_of_the_paper(name, batch):
    x = batch.logprobs.clone().requires_grad_()
    loss, metrics = ours(name, batch, x)
    loss.backward()
    values = batch.logprobs.double().tolist()
    assert loss.item() == pytest.approx(expected(name, batch, values), rel=1e-5, abs=1e-6)
    assert metrics["loss"] == loss
    for row in range(ROWS):
        for t in range(WIDTH):
            at, sides = values[row][t], []
            for step in (1e-6, -1e-6):
                values[row][t] = at + step
                sides.append(expected(name, batch, values))
            values[row][t] = at
            slope = (sides[0] - sides[1]) / 2e-6
            assert x.grad[row, t].item() == pytest.approx(slope, rel=1e-4, abs=1e-6), (row, t)
    cut = {"clip", "gspo", "gmpo"}
    assert (metrics["ppo_clip_fraction"] > 0) == (name in cut)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_micro_batches_add_up_and_other_slots_may_hold_nan(name, batch):
    x = batch.logprobs.clone().requires_grad_()
    whole, _ = ours(name, batch, x)
    whole.backward()
    keys, counts = ("prev", "advantages", "logprobs"), batch.mask.bool()
    poisoned = {key: torch.where(counts, getattr(batch, key), NAN) for key in keys}
    poisoned = SimpleNamespace(mask=batch.mask, **poisoned)
    y = poisoned.logprobs.clone().requires_grad_()
    parts = [ours(name, poisoned, y, slice(start, start + 2))[0] for start in (0, 2, 4)]
    sum(parts).backward()
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(y.grad, x.grad)


def test_the_mean_by_a_constant_does_not_know_the_length():
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    weights = loss_weights(mask, "constant", longest=10)
    torch.testing.assert_close(weights, mask / 3 / 10)
    with pytest.raises(ValueError, match="longest=None"):
        loss_weights(mask, "constant")
