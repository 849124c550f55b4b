# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A reward model and data loaders that, with the policy of `ppo_fakes`, run a whole `RSTrainer` in
milliseconds.
"""

import torch

from nemo_aligner.algorithms.rs import RSTrainer
from nemo_aligner.core.types import Scores
from nemo_aligner.data.nlp.samplers import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)
from nemo_aligner.parallel import parallel_state
from tests.ppo_fakes import (
    FakeCheckpoints,
    FakeFuture,
    FakeLogger,
    FakeOptimizer,
    FakePolicy,
    FakeRunTimer,
    FakeScheduler,
    Prompts,
    collate,
    config,
)


class FakeRSPolicy(FakePolicy):
    """The fake policy with the likelihood loss: masked sum of log-probs, over all ranks."""

    def get_loss_and_metrics(self, batch, forward_only):
        assert not forward_only
        self.events.append("update")
        self.batches.append({key: value.clone() for key, value in batch.items()})
        logprobs = self._logprobs(batch["response_tokens"], self.weight)
        total = torch.where(batch["mask"].bool(), logprobs, 0).double().sum()
        if parallel_state.get_data_parallel_world_size() > 1:
            torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        self.gradient = -total.item() / 100
        return -total.item(), {}


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
        self.scored += [
            (tuple(row[:length].tolist()), float(reward))
            for row, length, reward in zip(tokens, lengths, rewards)
        ]
        parts = {"kind": rewards, "terse": -lengths.float()}
        return FakeFuture(self.events, "rm_result", Scores(rewards, None, parts))


def dataloader(global_batch_size, micro_batch_size, *, random=False, num_workers=0, dataset=None):
    """The project's own samplers, and a loader as the script builds it."""
    dataset = dataset or Prompts()
    sampler = (MegatronPretrainingRandomSampler if random else MegatronPretrainingSampler)(
        len(dataset),
        0,
        micro_batch_size,
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        global_batch_size=global_batch_size,
        seed=5,
    )
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=num_workers,
        generator=torch.Generator(),
    )


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
    """A trainer among fakes, `events` its record of calls; 24 prompts, 8 per step, 3 responses
    each of which 2 are kept, global batches of 4."""
    events = []
    policy = FakeRSPolicy(events)
    loaders = {"random": random, "num_workers": num_workers, "dataset": dataset}
    trainer = RSTrainer(
        cfg=config(**changes),
        model=policy,
        optimizer=FakeOptimizer(policy, events),
        scheduler=FakeScheduler(),
        train_dataloader=dataloader(rollout_size, micro_batch_size, **loaders),
        val_dataloader=dataloader(4, micro_batch_size, dataset=dataset)
        if has_validation
        else None,
        logger=FakeLogger(),
        ckpt_callback=FakeCheckpoints(events),
        run_timer=FakeRunTimer(time_limit),
        num_rollouts_per_prompt=responses,
        top_n_rollouts=top_n,
        rm=FakeRewardModel(events, score),
    )
    trainer.events = events
    return trainer
