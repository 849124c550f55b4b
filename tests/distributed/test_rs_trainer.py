# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The rejection-sampling trainer on two data-parallel ranks does what it does on one: same
selection, global batches, metrics and weights."""

import pytest

from tests.distributed.launcher import run_ranks
from tests.distributed.test_ppo_trainer import assert_equal_runs, refusals, run

SETTINGS = dict(val_check_interval=1, save_interval=1, max_epochs=2)


def coarse(rollout):
    """Rewards with many ties: which of equal ones are kept must not depend on the ranks either."""
    return (rollout["response_lengths"] - rollout["prompt_lengths"]).float() // 2


def run_trainer(micro_batch_size=2):
    from tests import rs_fakes

    return run(
        rs_fakes.make_rs_trainer(score=coarse, micro_batch_size=micro_batch_size, **SETTINGS)
    )


def run_on_this_rank():
    """All experiments in one start of the interpreters."""
    from nemo_aligner.parallel import parallel_state
    from tests import rs_fakes

    parallel_state.initialize()
    results = {"twos": run_trainer(2), "ones": run_trainer(1)}
    return results | refusals(rs_fakes.make_rs_trainer, "rs")


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(run_on_this_rank, 2, 120)


@pytest.mark.parametrize("micro_batches", ["twos", "ones"])
def test_two_ranks_equal_one(two_ranks, micro_batches):
    one, two = run_trainer(), [results[micro_batches] for results in two_ranks]
    assert len(one["batches"]) == 24
    assert_equal_runs(one, two, rtol=0)


def test_ranks_that_resume_from_different_checkpoints_are_refused(two_ranks):
    for results in two_ranks:
        assert "rank 1 resumes from {'step': 1" in results["unequal_states"]
        assert "a job with 6" in results["other_steps"]
