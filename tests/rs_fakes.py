# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Policies, a reward model and data loaders that, with `ppo_fakes`, run a whole `RSTrainer` or
`ReinforceTrainer` in milliseconds.
"""

import torch

from nemo_aligner.algorithms.reinforce import ReinforceTrainer
from nemo_aligner.algorithms.rs import RSTrainer
from nemo_aligner.core.types import Scores
from nemo_aligner.data.nlp.samplers import (
    DefaultBatchIterator,
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from tests.ppo_fakes import (
    FakeFuture,
    FakePolicy,
    Prompts,
    among_fakes,
    builders,
    collate,
    sampler_of,
    sum_over_ranks,
)


class FakeRSPolicy(FakePolicy):
    """The fake policy with the likelihood loss: masked sum of log-probs, over all ranks."""

    scale = 100

    def loss(self, batch, mask, weights=1.0):
        logprobs = self._logprobs(batch["response_tokens"], self.weight)
        total = sum_over_ranks(torch.where(mask, weights * logprobs, 0).double().sum())
        self.gradient = -total.item() / self.scale
        return -total.item(), {}


class FakeReinforcePolicy(FakeRSPolicy):
    """With the loss of REINFORCE."""

    scale = 1

    def loss(self, batch, mask):
        advantages = (batch["rewards_with_kl"] - batch["baseline"])[:, None]
        return super().loss(batch, mask & batch["is_end"][:, None], advantages)


class FakeRewardModel:
    """Reward of a response: mean of all its tokens / 10, or what `score(rollout)` says, f32
    [b].
    """

    def __init__(self, events, score=None):
        self.events, self.score = events, score
        self.scored = []

    def infer_rm(self, rollout_batch):
        self.events.append("rm_infer")
        tokens, lengths = rollout_batch["response_tokens"], rollout_batch["response_lengths"]
        rewards = self.score(rollout_batch) if self.score else tokens.sum(-1) / lengths / 10
        rows = [tuple(row[:length].tolist()) for row, length in zip(tokens, lengths)]
        self.scored += list(zip(rows, map(float, rewards)))
        parts = {"kind": rewards, "terse": -lengths.float()}
        return FakeFuture(self.events, "rm_result", Scores(rewards, None, parts))


def dataloader(global_batch_size, micro_batch_size, *, random=False, num_workers=0, dataset=None):
    """The project's own samplers, and a loader as the script builds it."""
    dataset = dataset or Prompts()
    cls = MegatronPretrainingRandomSampler if random else MegatronPretrainingSampler
    sampler = sampler_of(cls, global_batch_size, micro_batch_size, total=len(dataset))
    own = {"num_workers": num_workers, "generator": torch.Generator(), "collate_fn": collate}
    return torch.utils.data.DataLoader(dataset, batch_sampler=sampler, **own)


def make_rs_trainer(
    *,
    rollout_size=8,
    micro_batch_size=2,
    responses=3,
    top_n=2,
    time_limit=None,
    score=None,
    random=True,
    num_workers=0,
    dataset=None,
    has_validation=True,
    **changes,
):
    """24 prompts, 8 per step, 3 responses each of which 2 are kept, global batches of 4."""
    policy = FakeRSPolicy([])
    loaders = {"random": random, "num_workers": num_workers, "dataset": dataset}
    train = dataloader(rollout_size, micro_batch_size, **loaders)
    validation = dataloader(4, micro_batch_size, dataset=dataset) if has_validation else None
    parts = {"train_dataloader": train, "val_dataloader": validation, "top_n_rollouts": top_n}
    parts |= {"num_rollouts_per_prompt": responses, "rm": FakeRewardModel(policy.events, score)}
    return among_fakes(RSTrainer, policy, changes, time_limit, **parts)


def make_reinforce_trainer(
    *, rollout_size=8, micro_batch_size=2, time_limit=None, score=None, **changes
):
    """24 prompts, 8 per step, 3 responses to each, global batches of 4."""
    policy = FakeReinforcePolicy([])
    changes = {"num_rollouts_per_prompt": 3} | changes
    parts = builders(rollout_size, micro_batch_size)
    parts |= {"batch_iterator_cls": DefaultBatchIterator}
    parts |= {"collate_fn": collate, "rm": FakeRewardModel(policy.events, score)}
    return among_fakes(ReinforceTrainer, policy, changes, time_limit, **parts)
