# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The PPO trainer on two data-parallel ranks does what it does on one: same global batches, metrics and weights."""

import pytest
import torch

from tests.distributed.launcher import run_ranks

SETTINGS = dict(ppo_epochs=2, critic_warmup_steps=1, val_check_interval=1, save_interval=1)


def run_trainer(settings, queue_of_rank_0=False):
    from nemo_aligner.utils import parallel_state
    from tests import ppo_fakes

    parallel_state.initialize()
    trainer = ppo_fakes.make_trainer(**settings)
    if queue_of_rank_0:  # a work queue that one rank has drained before the other came
        trainer.batch_iterator_cls = rank_0_draws_everything
    trainer.fit()
    return {
        "batches": trainer.model.batches,
        "critic": trainer.rm_critic.train_batches,
        "weight": trainer.model.weight,
        "metrics": [entry for entry in trainer.logger.metrics if not entry[0].startswith("timers/")],
        "tables": trainer.logger.tables,
        "state": trainer.state_dict(),
    }


def rank_0_draws_everything(sampler_iter, num_microbatches, dataset, collate_fn):
    indices = [list(sampler_iter)[:num_microbatches]]
    everyones = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, indices[0])
    if torch.distributed.get_rank() == 0:
        for micro_batch in sum(everyones, []):
            yield collate_fn([dataset[i] for i in micro_batch])


def load_unequal_states():
    from nemo_aligner.utils import parallel_state
    from tests import ppo_fakes

    parallel_state.initialize()
    trainer = ppo_fakes.make_trainer()
    rank = torch.distributed.get_rank()
    with pytest.raises(RuntimeError, match="rank 1 resumes from .*'step': 1"):
        trainer.load_state_dict({"step": rank, "consumed_samples": 0, "ppo_optimization_step": 0})


def assert_equal_runs(one, two):
    """`one`: the result of one rank; `two`: the results of both ranks."""
    assert one["state"] == two[0]["state"] == two[1]["state"]
    assert len(one["batches"]) == len(two[0]["batches"]) == 12
    for k, whole in enumerate(one["batches"]):
        for key, value in whole.items():
            shares = torch.cat([result["batches"][k][key] for result in two])
            torch.testing.assert_close(shares, value, rtol=1e-5, atol=1e-5, equal_nan=True)
    for k, whole in enumerate(one["critic"]):
        gathered = {key: torch.cat([result["critic"][k][key] for result in two]) for key in whole}
        order = gathered["sample_order"].argsort()  # the client sends rows in this order
        for key, value in whole.items():
            torch.testing.assert_close(gathered[key][order], value, rtol=1e-5, atol=1e-5, equal_nan=True)
    for result in two:
        assert result["tables"] == one["tables"]
        assert [entry[:2] for entry in result["metrics"]] == [entry[:2] for entry in one["metrics"]]
        for (name, _, value), (_, _, expected) in zip(result["metrics"], one["metrics"], strict=True):
            assert value == pytest.approx(expected, rel=1e-4, abs=1e-5), name
        assert result["weight"] == pytest.approx(one["weight"], rel=1e-5)


@pytest.fixture(scope="module")
def one_rank():
    (result,) = run_ranks(run_trainer, 1, 120, SETTINGS)
    return result


def test_two_ranks_equal_one(one_rank):
    assert_equal_runs(one_rank, run_ranks(run_trainer, 2, 120, SETTINGS))


def test_a_rank_that_drew_no_prompt_changes_nothing(one_rank):
    assert_equal_runs(one_rank, run_ranks(run_trainer, 2, 120, SETTINGS, True))


def test_ranks_that_resume_from_different_checkpoints_are_refused():
    run_ranks(load_unequal_states, 2, 120)
