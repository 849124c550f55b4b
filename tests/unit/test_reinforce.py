# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The REINFORCE trainer with a fake policy and a fake reward model: its data against a naive loop,
order of calls, KL of 0 at the start, resuming, bad values.
"""

import pytest
import torch

from nemo_aligner.core.errors import PolicyReferenceError
from tests.rs_fakes import make_reinforce_trainer

NAN = float("nan")


def scored_rollout():
    """Two prompts with three responses each, ragged: of the first one did not end; one of the
    second has no response token that counts.
    """
    generator = torch.Generator().manual_seed(7)
    prompt_lengths = torch.tensor([2, 2, 2, 3, 3, 3])
    response_lengths = torch.tensor([5, 8, 4, 6, 7, 3])
    rollout = {"response_tokens": torch.randint(0, 40, (6, 8), generator=generator)}
    rollout |= {"response_lengths": response_lengths, "prompt_lengths": prompt_lengths}
    rollout |= {"idx": torch.tensor([4, 4, 4, 9, 9, 9])}
    rollout |= {"is_end": torch.tensor([True, False, True, True, True, True])}
    rollout |= {"rewards": torch.randn(6, generator=generator)}
    for key in ("logprobs", "init_logprobs"):
        rollout[key] = -torch.rand(6, 7, generator=generator)
        for row, (prompt, total) in enumerate(zip(prompt_lengths, response_lengths, strict=True)):
            rollout[key][row, : prompt - 1] = NAN
            rollout[key][row, total - 1 :] = NAN
    return rollout


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_data_equal_a_naive_loop(penalty, absolute):
    """KL: the mean over the tokens of a response. Baseline: the mean of the other responses that
    ended.
    """
    trainer = make_reinforce_trainer(initial_policy_kl_penalty=penalty, use_absolute_kl=absolute)
    rollout = scored_rollout()
    data, metrics = trainer.generate_reinforce_data(rollout)

    kls, rewards = [], []
    for row in range(6):
        span = slice(rollout["prompt_lengths"][row] - 1, rollout["response_lengths"][row] - 1)
        ratios = (rollout["logprobs"] - rollout["init_logprobs"])[row, span].tolist()
        ratios = [abs(ratio) if absolute else ratio for ratio in ratios]
        kls.append(sum(ratios) / max(len(ratios), 1) if penalty else 0.0)
        rewards.append(float(rollout["rewards"][row]) - penalty * kls[-1])
    counts = [0, 2, 3, 4]  # ended, with at least one token
    for row in range(6):
        others = [r for r in counts if rollout["idx"][r] == rollout["idx"][row] and r != row]
        baseline = sum(rewards[r] for r in others) / len(others)
        assert float(data["baseline"][row]) == pytest.approx(baseline, rel=1e-5), row
        assert float(data["rewards_with_kl"][row]) == pytest.approx(rewards[row], rel=1e-5), row
    assert metrics["rewards_with_kl"] == pytest.approx(sum(rewards[:5]) / 5, rel=1e-5)
    assert metrics["init_policy_kl"] == pytest.approx(sum(kls[:5]) / 5, rel=1e-5, abs=1e-9)
    assert metrics["fraction_of_prompts_without_signal"] == 0
    assert data["mask"].sum(1).tolist() == [3, 6, 2, 3, 4, 0]


@pytest.mark.parametrize("penalty, measured", [(0.1, 2), (0.0, 0)])
def test_the_sampler_is_compared_where_the_log_probs_are_known(penalty, measured):
    alarms = {"sampling_mismatch": 0.05, "replica_check_interval": 0}
    trainer = make_reinforce_trainer(max_steps=2, initial_policy_kl_penalty=penalty, alarms=alarms)
    asked, infer = [], trainer.model.infer
    trainer.model.infer = lambda batch: (asked.append(batch["return_logprobs"]), infer(batch))[1]
    trainer.fit()
    found = trainer.logger.series("train_rollouts/sampling_ratio_mean_error")
    assert len(found) == measured and all(error == 0 for _, error in found)
    assert asked and all(wanted == bool(penalty) for wanted in asked)


def test_the_kl_is_0_at_the_start_and_a_reference_that_differs_ends_the_run():
    trainer = make_reinforce_trainer(max_steps=2)
    trainer.fit()
    kl = trainer.logger.series("train_rollouts/init_policy_kl")
    assert kl[0] == (0, 0.0) and kl[1][1] != 0
    assert trainer.logger.series("train_rollouts/policy_reference_difference") == [(0, 0.0)]
    other = make_reinforce_trainer()
    other.model.reference_offset = 0.1
    with pytest.raises(PolicyReferenceError):
        other.fit()
    earlier = make_reinforce_trainer(max_steps=1)
    earlier.model.reference_offset, earlier.model.starts_as_reference = 0.1, False
    earlier.fit()
    assert earlier.logger.series("train_rollouts/init_policy_kl")[0][1] != 0


def test_an_old_kl_is_warned_about(warnings):
    make_reinforce_trainer(use_absolute_kl=True, initial_policy_kl_penalty=0.0)
    assert not warnings
    make_reinforce_trainer(use_absolute_kl=True)
    assert any("trainer.reinforce.use_absolute_kl=True" in text for text in warnings)
