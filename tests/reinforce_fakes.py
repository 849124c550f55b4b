# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""A whole `ReinforceTrainer` in milliseconds, with the policy of `ppo_fakes` and the reward model
of `rs_fakes`.
"""

import functools

import torch

from nemo_aligner.algorithms.reinforce import ReinforceTrainer
from nemo_aligner.parallel import parallel_state
from tests.ppo_fakes import (
    FakeCheckpoints,
    FakeLogger,
    FakeOptimizer,
    FakePolicy,
    FakeRunTimer,
    FakeScheduler,
    batch_iterator,
    collate,
    config,
    dataloader_builder,
)
from tests.rs_fakes import FakeRewardModel


class FakeReinforcePolicy(FakePolicy):
    """The fake policy with the loss of REINFORCE, summed over all ranks."""

    def get_loss_and_metrics(self, batch, forward_only):
        assert not forward_only
        self.events.append("update")
        self.batches.append({key: value.clone() for key, value in batch.items()})
        mask = batch["mask"].bool() & batch["is_end"][:, None]
        advantages = (batch["rewards_with_kl"] - batch["baseline"])[:, None]
        logprobs = self._logprobs(batch["response_tokens"], self.weight)
        total = torch.where(mask, advantages * logprobs, 0).double().sum()
        if parallel_state.get_data_parallel_world_size() > 1:
            torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        self.gradient = -total.item()
        return -total.item(), {}


def make_reinforce_trainer(
    *, rollout_size=8, micro_batch_size=2, time_limit=None, score=None, **changes
):
    """A trainer among fakes, `events` its record of calls; 24 prompts, 8 per step, 3 responses to
    each, global batches of 4.
    """
    events = []
    policy = FakeReinforcePolicy(events)
    trainer = ReinforceTrainer(
        cfg=config(**({"num_rollouts_per_prompt": 3} | changes)),
        model=policy,
        optimizer=FakeOptimizer(policy, events),
        scheduler=FakeScheduler(),
        train_dataloader_builder=functools.partial(
            dataloader_builder, rollout_size, micro_batch_size=micro_batch_size
        ),
        val_dataloader_builder=functools.partial(
            dataloader_builder, 4, micro_batch_size=micro_batch_size
        ),
        collate_fn=collate,
        rm=FakeRewardModel(events, score),
        batch_iterator_cls=batch_iterator,
        logger=FakeLogger(),
        ckpt_callback=FakeCheckpoints(events),
        run_timer=FakeRunTimer(time_limit),
    )
    trainer.events = events
    return trainer
