# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: which prompts are drawn, which stay, and what a resumed run draws; with a
reward that is the same for all responses to some prompts."""

import functools

import pytest
import torch

from nemo_aligner.algorithms.dynamic_sampling import DrawnPrompts
from nemo_aligner.algorithms.rollouts import PPORolloutBatch
from nemo_aligner.core.types import Scores
from nemo_aligner.data.nlp.samplers import MegatronPretrainingRandomSampler
from tests.ppo_fakes import (
    NUM_PROMPTS,
    FakeRewards,
    dataloader_builder,
    fit_until_stopped,
    make_trainer,
)


class DullRewards(FakeRewards):
    """The same reward for all responses to each prompt of a dull number."""

    dull = frozenset(range(0, NUM_PROMPTS, 2))

    def infer_rm_critic(self, rollout_batch):
        future = super().infer_rm_critic(rollout_batch)
        numbers = rollout_batch["response_tokens"][:, 0] - 1
        is_dull = torch.tensor([int(number) in self.dull for number in numbers])
        rewards = torch.where(is_dull, 0.25, future.value.rewards)
        future.value = Scores(rewards, None, {"kind": 2 * rewards})
        return future


def make(rounds, dull=DullRewards.dull, **changes):
    settings = dict(advantage_estimator="grpo", num_rollouts_per_prompt=3)
    settings |= dict(initial_policy_kl_penalty=0.0, dynamic_sampling_rounds=rounds)
    in_random_order = {"cls": MegatronPretrainingRandomSampler}
    settings["builder"] = functools.partial(dataloader_builder, 8, **in_random_order)
    trainer = make_trainer(**settings | changes)
    rewards = DullRewards(trainer.events)
    rewards.dull = dull
    trainer.rm_critic, trainer.score = rewards, rewards.infer_rm_critic
    return trainer


def trained_on(trainer, updates=slice(None)):
    """Numbers of the prompts of the updates, sorted; each with as many responses."""
    batches = trainer.model.batches[updates]
    rows = torch.cat([batch["response_tokens"][:, 0] - 1 for batch in batches])
    numbers, counts = rows.unique(return_counts=True)
    assert set(counts.tolist()) == {3}
    return numbers.tolist()


def test_a_rollout_is_filled_with_prompts_that_have_a_signal():
    trainer = make(4, max_steps=1)
    trainer.fit()
    numbers = trained_on(trainer)
    assert len(numbers) == 8 and not DullRewards.dull & set(numbers)
    drawn = trainer.consumed_samples
    assert drawn in (16, 24)  # an epoch has 12 prompts with a signal, a round some 4
    first = {name: value for name, step, value in trainer.logger.metrics if step == 0}
    assert first["train_rollouts/prompts_drawn"] == drawn
    assert first["train_rollouts/fraction_of_prompts_without_signal"] == 0
    assert first["train_rollouts/rollout_size"] == 24
    kind, every = (first[f"train_rollouts/rewards{end}"] for end in ("_kind", ""))
    assert kind == pytest.approx(2 * every)
    assert len(trainer.logger.series("timers/generate")) == 1  # of all rounds together
    off = make(0, max_steps=1)
    off.fit()
    assert DullRewards.dull & set(trained_on(off)) and off.consumed_samples == 8


def test_a_prompt_that_comes_back_within_a_step_counts_once():
    """Its random streams are those of the first time."""
    trainer = make(9, dull=frozenset(range(NUM_PROMPTS)) - {5, 7}, max_steps=1)
    trainer.fit()
    assert trainer.consumed_samples == 80 and len(trained_on(trainer)) == 8


def test_a_resumed_run_draws_the_same():
    whole = make(4, max_steps=3, save_interval=1)
    whole.fit()
    first = make(4, max_steps=3, save_interval=1, time_limit=1)
    fit_until_stopped(first)
    state = first.ckpt_callback.saved[-1][2]
    assert state["step"] == 1 and state["consumed_samples"] > 8
    second = make(4, max_steps=3, save_interval=1)
    second.model.weight = first.model.weight
    second.load_state_dict(state)
    second.fit()
    assert second.state_dict() == whole.state_dict()
    assert second.model.weight == whole.model.weight != 0
    assert trained_on(second, slice(0, 6)) == trained_on(whole, slice(6, 12))


def rollout_of(idx, **more):
    tokens, lengths = torch.ones(len(idx), 3, dtype=torch.int64), torch.full_like(idx, 3)
    rollout = {"response_tokens": tokens, "response_lengths": lengths, "idx": idx}
    return PPORolloutBatch(rollout | {"prompt_lengths": torch.ones_like(idx)} | more)


def test_choice_is_that_of_a_loop_over_the_rounds():
    generator = torch.Generator().manual_seed(0)
    for trial in range(30):
        wanted, responses = 4, 2
        drawn = DrawnPrompts(wanted, responses, (1, trial), 0)
        candidates, spare = [], []
        for number in range(3):
            idx = torch.randperm(10, generator=generator)[:wanted].sort().values
            rewards = torch.randint(0, 2, (wanted * responses,), generator=generator).float()
            drawn.add(rollout_of(idx.repeat_interleave(responses)), Scores(rewards))
            differ = [bool(a != b) for a, b in rewards.view(-1, 2)]
            seen = {number for number, _ in candidates + spare}
            fresh = [(n, i) for i, n in enumerate(idx.tolist()) if n not in seen]
            place = len(drawn.idx) - wanted
            candidates += [(n, place + i) for n, i in fresh if differ[i]]
            spare += [(n, place + i) for n, i in fresh if not differ[i]]
            full = len(candidates) >= wanted
            places = drawn.places
            assert all(drawn.differ[place] for place in places) == full
            assert len(places) == wanted
            if full:
                assert set(places) <= {place for _, place in candidates}
            else:
                assert {place for _, place in candidates} <= set(places)
                assert set(places) <= {place for _, place in candidates + spare}
            indices = [drawn.idx[place] for place in places]
            assert indices == sorted(indices)


def test_prompts_that_cannot_be_used_have_no_signal():
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    usable = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    drawn = DrawnPrompts(3, 2, (1, 0), 0)
    drawn.add(rollout_of(torch.arange(6) // 2, loss_multiplier=usable), Scores(rewards))
    assert drawn.differ == [True, False, False]
