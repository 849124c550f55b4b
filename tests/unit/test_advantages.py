# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Advantages against naive sums and the statistics module. Other libraries: test_oracles.py; slots
that do not count: test_masked_slots.py; rollouts: test_ppo_data.py.
"""

import statistics

import pytest
import torch

from nemo_aligner.core import advantages
from nemo_aligner.core.advantages import (
    RESPONSE_ESTIMATORS,
    calculate_advantages_and_returns,
    calculate_grpo_advantages,
    calculate_rloo_advantages,
)
from nemo_aligner.core.tensors import create_mask, masked_mean_var, whiten
from tests.rank_threads import run_rank_threads


def ragged(seed=0, rows=6, width=9):
    """(values, token rewards, mask) [rows, width]; the masks start and end anywhere."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, 5, (rows,), generator=generator)
    total = prompt + torch.randint(1, 5, (rows,), generator=generator)
    values, rewards = (torch.randn(rows, width, generator=generator) for _ in range(2))
    return values, rewards, create_mask(values, prompt, total)


def scored_groups(seed=0):
    """(scores [N], prompts [N, 2], valid [N]): groups of 1 to 5 samples in mixed order, some not
    valid.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = [1, 2, 3, 4, 5, 4]
    prompt = torch.tensor([g for g, size in enumerate(sizes) for _ in range(size)])
    order = torch.randperm(len(prompt), generator=generator)
    prompts = torch.stack([prompt % 3, prompt // 3], dim=1)[order]
    valid = torch.rand(len(prompt), generator=generator) > 0.25
    return torch.randn(len(prompt), generator=generator), prompts, valid


def members(prompts, valid, row):
    """Valid samples of the same prompt, including the sample itself if it is valid."""
    same = lambda i: valid[i] and prompts[i].tolist() == prompts[row].tolist()
    return [i for i in range(len(prompts)) if same(i)]


@pytest.mark.parametrize(
    "gamma,lam,critic_lam", [(1.0, 0.95, 1.0), (0.9, 0.5, 0.8), (0.99, 1.0, 0.0)]
)
def test_decoupled_gae_against_naive_sums(gamma, lam, critic_lam):
    values, rewards, mask = ragged()

    def naive(row, t, lam):
        slots = mask[row].nonzero().flatten().tolist()
        v, r = values[row].tolist(), rewards[row].tolist()
        deltas = {k: r[k] + gamma * (v[k + 1] if k + 1 in slots else 0.0) - v[k] for k in slots}
        return sum((gamma * lam) ** (k - t) * delta for k, delta in deltas.items() if k >= t)

    given = values, rewards, gamma, lam, mask, critic_lam
    advantages, returns = calculate_advantages_and_returns(*given)
    for row, t in mask.nonzero().tolist():
        assert advantages[row, t].item() == pytest.approx(naive(row, t, lam), abs=1e-5)
        wanted = pytest.approx(naive(row, t, critic_lam) + values[row, t].item(), abs=1e-5)
        assert returns[row, t].item() == wanted
    # Without a lambda of its own the critic has the actor's.
    same = calculate_advantages_and_returns(values, rewards, gamma, lam, mask)
    assert torch.equal(same[0], advantages)
    assert torch.equal(
        same[1], calculate_advantages_and_returns(values, rewards, gamma, lam, mask, lam)[1]
    )


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo"])
def test_estimators_of_groups_against_the_statistics_module(name):
    scores, prompts, valid = scored_groups(seed=4)
    advantages = RESPONSE_ESTIMATORS[name](scores, prompts, valid)
    lonely = 0
    for row in range(len(scores)):
        group = [scores[i].item() for i in members(prompts, valid, row)]
        expected = 0.0
        if valid[row] and len(group) > 1:
            expected = scores[row].item() - statistics.fmean(group)
            expected *= len(group) / (len(group) - 1) if name == "rloo" else 1
            expected /= statistics.stdev(group) + 1e-6 if name == "grpo" else 1
        lonely += bool(valid[row]) and len(group) == 1
        assert advantages[row].item() == pytest.approx(expected, abs=1e-5)
    assert lonely and not valid.all()
    # An index for each prompt says the same as its tokens.
    found = RESPONSE_ESTIMATORS[name](scores, prompts[:, 0] + 3 * prompts[:, 1], valid)
    assert torch.equal(found, advantages)
    assert RESPONSE_ESTIMATORS[name](scores[:0], prompts[:0], valid[:0]).shape == (0,)


def test_rloo_by_hand():
    found = calculate_rloo_advantages(torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3))
    assert found.tolist() == [-3.0, -1.5, 4.5]


def test_gdpo_against_the_statistics_module():
    """A reward a thousand times as large as the other counts as much."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.tensor([4, 9, 4, 9, 4, 9, 9, 4])
    valid = torch.tensor([True] * 7 + [False])
    parts = torch.randn(8, 2, generator=generator).double() * torch.tensor([1000.0, 1.0])
    weights = (0.3, 0.7)
    totals = {}
    for row in range(7):
        group = [r for r in range(7) if prompts[r] == prompts[row]]
        totals[row] = 0.0
        for column, weight in enumerate(weights):
            rewards = [float(parts[r, column]) for r in group]
            deviation = float(parts[row, column]) - statistics.mean(rewards)
            totals[row] += weight * deviation / (statistics.stdev(rewards) + 1e-6)
    std = statistics.stdev(totals.values())
    expected = [total / (std + 1e-6) for total in totals.values()] + [0.0]
    found = advantages.calculate_gdpo_advantages(parts, prompts, valid, weights)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_running_moments_are_those_of_all_rewards():
    moments, seen = advantages.RunningMoments(), []
    assert moments.std == 1.0
    for size in (5, 1, 7):
        rewards = torch.randn(size, generator=torch.Generator().manual_seed(size)) + 100
        mask = torch.arange(size) != 2  # one does not count
        moments.update(rewards.masked_fill(~mask, 1e9), mask)
        seen += rewards[mask].tolist()
    assert moments.mean == pytest.approx(statistics.mean(seen), rel=1e-12)
    assert moments.std == pytest.approx(statistics.stdev(seen), rel=1e-9)
    states = set()
    for seed in range(20):  # as the ranks may hold them
        other = advantages.RunningMoments(3, 1.0, 2.0)
        order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(seed))
        other.update(torch.tensor(seen)[order], torch.ones(len(seen)))
        states.add((other.mean, other.squares))
    assert len(states) == 1


def test_equal_scores_give_no_advantage():
    """0.1 is no binary number: its mean over three samples must not leave a rounding error that
    eps blows up.
    """
    scores, idx = torch.full((3,), 0.1), torch.tensor([5, 5, 5])
    assert calculate_grpo_advantages(scores, idx).abs().max() < 1e-9
    assert calculate_rloo_advantages(scores, idx).abs().max() < 1e-9
    assert calculate_grpo_advantages(scores + 1000, idx).abs().max() < 1e-6


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_whitening_over_ranks_against_the_statistics_module(num_ranks):
    generator = torch.Generator().manual_seed(5)
    values = 3.0 * torch.randn(6, 9, generator=generator) + 100.0
    mask = (torch.rand(6, 9, generator=generator) < 0.5).float()
    mask[0] = 0
    if num_ranks == 3:
        mask[2:4] = 0  # nothing counts on the second rank
    kept = values[mask.bool()].tolist()
    mean, std = statistics.fmean(kept), statistics.pstdev(kept)
    rows = len(values) // num_ranks

    def rank_main(rank, sum_over_ranks):
        share = slice(rank * rows, (rank + 1) * rows)
        x = torch.where(mask.bool(), values, torch.nan)[share]
        moments = masked_mean_var(x, mask[share], sum_over_ranks)
        made = (whiten(x, mask[share], shift, sum_over_ranks) for shift in (True, False))
        return *moments, *made

    means, variances, whitened, scaled = zip(*run_rank_threads(num_ranks, rank_main), strict=True)
    assert [float(m) for m in means] == pytest.approx([mean] * num_ranks)
    assert [float(v) for v in variances] == pytest.approx([std**2] * num_ranks)
    expected = mask * (values - mean) / std
    torch.testing.assert_close(torch.cat(whitened), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat(scaled), expected + mask * mean, atol=1e-4, rtol=0)
