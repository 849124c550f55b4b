# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Alarms: quantities against numbers by hand, warnings that are said once, checksums that see
every bit; and on a real model the faults that each is there for."""

import math

import pytest
import torch

from nemo_aligner.algorithms import alarms
from nemo_aligner.core.errors import NonFiniteError
from nemo_aligner.core.types import Scores
from nemo_aligner.parallel.collectives import CPU_PIECE
from nemo_aligner.parallel.collectives import checksum_of_shard as checksum
from nemo_aligner.training.megatron_steps import naming_step
from tests.ppo_fakes import FakeTokenizer

NAN = float("nan")


# -------------------------------------------------------------------------------------- warnings


def test_a_warning_is_said_when_its_state_begins_and_again_after_it_has_ended():
    said, active = [], []
    thresholds = {"clip_fraction": 0.5, "truncated_fraction": None}
    watch = alarms.Alarms("trainer.ppo.alarms", thresholds, said.append)
    for step, share in enumerate([0.5, 0.6, 0.9, 0.5, 0.51]):
        active.append(watch.watch({"ppo_clip_fraction": share}, step)["alarms_active"])
        # Switched off, and not of this phase.
        watch.watch({"fraction_of_samples_properly_ended": 0.0}, step)
    assert active == [0, 1, 1, 0, 1]
    assert len(said) == 2
    own = "clip_fraction is 0.6 at step 1, above trainer.ppo.alarms.clip_fraction=0.5."
    assert said[0].startswith(f"alarm: {own} ")
    assert "at step 4" in said[1] and "model.optim.lr" in said[1]
    assert "learning rate" not in said[1]


# A critic has time to learn, and what begins at chance is not watched in the first steps either.
@pytest.mark.parametrize(
    "job, key, metric, threshold, silent, loud, first",
    [
        ("ppo", "sampling_mismatch", "sampling_ratio_mean_error", 0.05, 0.05, math.inf, 0),
        ("ppo", "clip_fraction", "ppo_clip_fraction", 0.5, 0.5, 0.51, 0),
        ("ppo", "explained_variance", "explained_variance", -1.0, -1.0, -1.01, 10),
        ("ppo", "explained_variance", "explained_variance", -1.0, NAN, -math.inf, 10),
        ("ppo", "truncated_fraction", "fraction_of_samples_properly_ended", 0.9, 0.125, 0.0, 0),
        ("dpo", "accuracy", "acc", 0.4, 0.4, 0.3, 20),
        ("dpo", "margin", "margin", 0.0, 0.0, -0.1, 20),
        ("kto", "margin", "rewards_margin", 0.0, 0.0, -0.1, 20),
    ],
)
def test_thresholds(job, key, metric, threshold, silent, loud, first):
    said, name = [], f"trainer.{job}.alarms"
    watch = alarms.Alarms(name, {key: threshold}, said.append)
    for step in (0, first, 30):
        assert watch.watch({metric: silent}, step) == {"alarms_active": 0} and not said
    for step in range(first):
        assert watch.watch({metric: loud}, step) == {"alarms_active": 0} and not said
    assert watch.watch({metric: loud}, first) == {"alarms_active": 1} and len(said) == 1
    assert f"alarm: {key} is " in said[0] and f"{name}.{key}={threshold:g}" in said[0]
    for off in ({key: None}, None):
        watch = alarms.Alarms(name, off, said.append)
        assert watch.watch({metric: loud}, 30) == {"alarms_active": 0} and len(said) == 1


def test_only_the_first_rank_speaks(monkeypatch):
    said = []
    watch = alarms.Alarms("trainer.ppo.alarms", {"clip_fraction": 0.5}, said.append)
    monkeypatch.setattr(alarms.parallel_state, "get_rank", lambda: 1)
    assert watch.watch({"ppo_clip_fraction": 1.0}, 0) == {"alarms_active": 1} and not said


# ------------------------------------------------------------------------------------ quantities


def test_sampling_ratio_by_hand():
    trainer = torch.log(torch.tensor([[0.5, 0.2, 0.1], [0.25, 0.3, 0.9]]))
    sampler = torch.log(torch.tensor([[0.4, 0.2, 0.9], [0.5, 0.3, 0.1]]))
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    trainer[0, 2] = sampler[1, 2] = NAN  # outside the mask
    metrics = alarms.sampling_ratio_metrics(trainer, sampler, mask)
    # ratios 1.25, 1, 0.5, 1
    assert metrics["sampling_ratio_mean_error"] == pytest.approx((0.25 + 0 + 0.5 + 0) / 4)
    assert metrics["sampling_ratio_max"] == pytest.approx(2.0)  # 1 / 0.5
    trainer[0, 0] = NAN
    metrics = alarms.sampling_ratio_metrics(trainer, sampler, mask)
    assert metrics["sampling_ratio_mean_error"] == math.inf


def test_explained_variance_is_that_of_the_masked_slots():
    generator = torch.Generator().manual_seed(0)
    returns, values = torch.randn(2, 4, 6, generator=generator)
    mask = torch.rand(4, 6, generator=generator) < 0.5
    kept_returns, kept_values = returns[mask].numpy(), values[mask].numpy()
    expected = 1 - (kept_returns - kept_values).var() / kept_returns.var()
    returns[~mask], values[~mask] = NAN, NAN
    wanted = pytest.approx(float(expected), rel=1e-5)
    assert alarms.explained_variance(values, returns, mask) == wanted
    assert alarms.explained_variance(returns, returns, mask) == 1.0
    assert math.isnan(alarms.explained_variance(values, torch.ones_like(values), mask))
    assert math.isnan(alarms.explained_variance(values, returns, torch.zeros_like(mask)))


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named_by_its_prompt(bad):
    rollout = {"idx": torch.tensor([7, 11, 12]), "prompt_lengths": torch.tensor([2, 3, 90])}
    rollout["response_tokens"] = torch.arange(300).reshape(3, 100)
    said = f"PPO step 4: rewards of sample 11 .*'100 101 102'.* is {bad}; 2 of 3"
    with pytest.raises(NonFiniteError, match=said):
        with naming_step("PPO step 4"):
            scores = Scores(torch.tensor([1.0, bad, NAN]))
            alarms.check_rewards(rollout, scores, FakeTokenizer())
    good = torch.tensor([1.0, 2.0, 3.0])
    alarms.check_rewards(rollout, Scores(good), FakeTokenizer())
    scores = Scores(good, parts={"terse": torch.tensor([1.0, 2.0, bad])})
    named = r"rewards_terse of sample 12 .*'200 201 [^']*\.\.\.'"
    with pytest.raises(NonFiniteError, match=named):
        alarms.check_rewards(rollout, scores, FakeTokenizer())


# ------------------------------------------------------------------------------------- checksums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_sees_every_bit_and_every_place(dtype):
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    original = int(checksum(tensor))
    assert int(checksum(tensor.clone())) == original
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    for place in range(tensor.numel()):
        for bit in range(8 * tensor.element_size() - 1):
            changed = tensor.clone()
            changed.view(-1).view(integers)[place] ^= 1 << bit
            assert int(checksum(changed)) != original
    negative_zero = torch.zeros(3, dtype=dtype)
    negative_zero[1] = -0.0
    assert int(checksum(negative_zero)) != int(checksum(negative_zero.abs()))
    swapped = tensor.clone().view(-1)
    swapped[[2, 9]] = swapped[[9, 2]]
    assert int(checksum(swapped)) != original


def test_a_checksum_of_a_tensor_that_is_longer_than_a_piece_or_empty():
    tensor = torch.arange(2 * CPU_PIECE + 5, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[3, CPU_PIECE + 3]] = swapped[[CPU_PIECE + 3, 3]]  # the same place in two pieces
    assert int(checksum(swapped)) != int(checksum(tensor))
    assert int(checksum(torch.empty(0))) == 0
    turned = tensor[: 2 * CPU_PIECE].view(2, -1).t()
    assert int(checksum(turned)) == int(checksum(turned.clone()))
