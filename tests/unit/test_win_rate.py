# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Win rates, also at equal length, and their intervals: against closed forms, a search and loops
in plain Python.
"""

import math
import random

import pytest
import torch
from torch.nn.functional import logsigmoid

from nemo_aligner.core import win_rate
from nemo_aligner.core.win_rate import (
    LENGTH_EFFECT_PENALTY,
    bootstrap_interval,
    length_controlled_win_rate,
    resample,
    weighted_mean,
)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def naive_rate(won, difference):
    """The length-controlled win rate by PyTorch's search for the best logistic regression."""
    won, difference = torch.tensor(won).double(), torch.tensor(difference).double()
    effect = (difference / difference.std(correction=0)).tanh()
    theta_phi = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([theta_phi], max_iter=500, line_search_fn="strong_wolfe")

    def loss():
        search.zero_grad()
        logits = theta_phi[0] + theta_phi[1] * effect
        likelihood = won * logsigmoid(logits) + (1 - won) * logsigmoid(-logits)
        total = LENGTH_EFFECT_PENALTY / 2 * theta_phi[1] ** 2 - likelihood.sum()
        total.backward()
        return total

    search.step(loss)
    return theta_phi[0].sigmoid().item()


def pairs(n, seed, theta=0.3, phi=1.0):
    """Outcomes and differences in length, drawn from the model."""
    draw = random.Random(seed)
    difference = [round(draw.gauss(20, 60)) for _ in range(n)]
    chances = [sigmoid(theta + phi * math.tanh(d / 60)) for d in difference]
    won = [draw.choices([0.5, 1.0, 0.0], [0.1, chance, 0.3])[0] for chance in chances]
    return won, difference


@pytest.mark.parametrize("seed", range(4))
def test_length_control_finds_what_a_search_finds(seed):
    won, difference = pairs(25, seed)
    found = length_controlled_win_rate(torch.tensor(won), torch.tensor(difference))
    assert found.shape == (1,)
    assert float(found) == pytest.approx(naive_rate(won, difference), abs=1e-5)


def test_weights_are_repetitions_and_chunks_change_nothing(monkeypatch):
    won, difference = (torch.tensor(column) for column in pairs(20, 5))
    weights = torch.randint(0, 4, (6, 20), generator=torch.Generator().manual_seed(0))
    together = length_controlled_win_rate(won, difference, weights)
    for row, rate, mean in zip(weights, together, weighted_mean(won, weights), strict=True):
        repeated = torch.arange(20).repeat_interleave(row)
        one = length_controlled_win_rate(won[repeated], difference[repeated])
        assert float(one) == pytest.approx(float(rate), abs=1e-9)
        assert float(mean) == pytest.approx(float(won[repeated].mean()), abs=1e-6)
    monkeypatch.setattr(win_rate, "_CHUNK", 45)  # two weightings at a time
    assert length_controlled_win_rate(won, difference, weights[:5]).allclose(
        together[:5], atol=1e-12
    )


def test_a_policy_that_always_wins_or_always_ties():
    difference = torch.tensor([3.0, -8.0, 40.0])
    for outcome in (0.0, 0.5, 1.0):
        rate = length_controlled_win_rate(torch.full((3,), outcome), difference)
        assert float(rate) == pytest.approx(outcome, abs=1e-9)


def test_length_control_undoes_a_bias_to_length():
    """Equal policies, one of which is longer and is preferred for that: the plain win rate is well
    above one half, the length-controlled one is not.
    """
    draw = random.Random(0)
    difference = [draw.gauss(60, 60) for _ in range(20000)]
    won = [float(draw.random() < sigmoid(1.5 * math.tanh(d / 60))) for d in difference]
    won, difference = torch.tensor(won), torch.tensor(difference)
    assert float(won.mean()) > 0.65
    assert float(length_controlled_win_rate(won, difference)) == pytest.approx(0.5, abs=0.02)


def test_resamples_draw_whole_prompts():
    groups = torch.tensor([0, 0, 1, 2, 2, 2])
    weights = resample(groups, 500, 1)
    assert weights.shape == (500, 6)
    assert weights[:, 0].equal(weights[:, 1])
    assert weights[:, 3].equal(weights[:, 4]) and weights[:, 4].equal(weights[:, 5])
    per_prompt = weights[:, [0, 2, 3]]
    assert per_prompt.sum(1).eq(3).all()
    assert per_prompt.mean(0).allclose(torch.ones(3, dtype=torch.float64), atol=0.15)
    assert weights.equal(resample(groups, 500, 1))
    assert not weights.equal(resample(groups, 500, 2))


def test_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = resample(torch.arange(400), 4000, 0)
    low, high = bootstrap_interval(lambda w: weighted_mean(values, w), weights, 0.9)
    mean, error = float(values.mean()), float(values.std(correction=0)) / 20
    assert low == pytest.approx(mean - 1.645 * error, abs=0.1 * error)
    assert high == pytest.approx(mean + 1.645 * error, abs=0.1 * error)
