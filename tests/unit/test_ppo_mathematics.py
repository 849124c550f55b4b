# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO mathematics against numbers worked by hand and naive Python loops. Estimators:
test_advantages.py; slots that do not count: test_masked_slots.py; other libraries:
test_oracles.py.
"""

import math
import random

import pytest
import torch

from nemo_aligner.core.advantages import (
    calculate_ppo_rewards,
    select_topk,
)
from nemo_aligner.core.masks import create_mask, masked_mean, masked_std
from nemo_aligner.core.tensors import sample_seeds

NAN = float("nan")


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), atol=atol, rtol=0
    )


def test_masked_statistics_by_rows_and_of_nothing():
    values, mask = (
        torch.tensor([[1.0, 2.0, 6.0], [5.0, 7.0, 9.0]]),
        torch.tensor([[1, 0, 1], [0, 0, 0]]),
    )
    assert masked_mean(values, mask, dim=1).tolist() == [3.5, 0.0]
    assert masked_mean(values, mask).item() == 3.5
    assert masked_std(values, mask).item() == pytest.approx(math.sqrt(12.5))
    assert masked_std(values, mask, dim=1).tolist() == pytest.approx([math.sqrt(12.5), 0.0])


def test_reward_sits_at_the_last_response_column():
    values = torch.zeros(3, 5)
    per_token = calculate_ppo_rewards(
        values, torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([6, 3, 1]), 0.0
    )
    assert per_token.tolist() == [[0, 0, 0, 0, 1], [0, 2, 0, 0, 0], [3, 0, 0, 0, 0]]
    # A factor of 0 does not read the KL at all.
    assert (
        calculate_ppo_rewards(values, torch.ones(3), torch.full((3,), 4), values + NAN)
        .isnan()
        .sum()
        == 0
    )


def test_mask_has_as_many_ones_as_response_tokens():
    prompt, total = torch.tensor([1, 3, 4]), torch.tensor([5, 3, 9])
    mask = create_mask(torch.empty(3, 8), prompt, total)
    assert mask.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [0] * 8, [0, 0, 0, 1, 1, 1, 1, 1]]


def test_select_topk_against_python_sorting():
    random.seed(0)
    prompts = torch.tensor([[7, 7], [1, 2], [7, 7], [1, 2], [7, 7], [0, 9]])
    rewards = torch.tensor([[0.3], [0.5], [0.9], [-1.0], [0.6], [0.1]])
    batch = {"prompt_tokens": prompts, "rewards": rewards, "row": torch.arange(6)}
    assert select_topk(batch, 1)["row"].tolist() == [5, 1, 2]
    two = select_topk(batch, 2)
    assert two["row"].tolist() == [5, 3, 1, 4, 2]
    assert two["rewards"].flatten().tolist() == rewards.flatten()[[5, 3, 1, 4, 2]].tolist()
    with pytest.raises(ValueError, match="top_n_rollouts=0"):
        select_topk(batch, 0)
    with pytest.raises(ValueError, match="rollout 3 is NaN"):
        select_topk({**batch, "rewards": rewards.index_fill(0, torch.tensor([3]), NAN)})


def _python_splitmix64(state):
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_sample_seeds_against_unbounded_integers():
    assert (
        _python_splitmix64(0) == 0xE220A8397B1DCDAF
    )  # first output of the published generator for seed 0
    idx = torch.tensor([0, 1, 5, 2**40])
    for seed, step in [(1234, 0), (0, 7), (2**31 - 1, 10**6)]:
        state = _python_splitmix64((_python_splitmix64(seed) + step) % 2**64)
        expected = [_python_splitmix64((state + i) % 2**64) % 2**63 for i in idx.tolist()]
        assert sample_seeds(seed, step, idx).tolist() == expected
